"""Converts the key paths of leaves to names, and back; each key path has exactly one name.

A key path is a tuple of keys that begins with the component, such as ``("model",
"encoder.0.weight")``. The leaf's name joins the escaped keys with ``/``, which gives
``model/encoder.0.weight``. Escaping percent-encodes the few characters that would make a name
ambiguous or invalid as a storage key; torch's usual parameter names stay unchanged.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable

# "/" separates keys, "%" starts an escape, "*" stands for a layer index in stacked names,
# control characters and lone surrogates are not valid in storage keys.
_UNSAFE = re.compile(r"[%/*\x00-\x1f\x7f\ud800-\udfff]")
# The escaped form of the empty key. It is unambiguous: in all other forms, hex digits follow a "%".
_EMPTY = "%"
# Characters that occur in no name; "%" and "/" do occur in names.
_FOREIGN = re.compile(r"[*\x00-\x1f\x7f\ud800-\udfff]")
_SEPARATOR = "/"
# A number with the punctuation in it, or a word; a capital letter begins a word, as in ``runA``.
_WORD = re.compile(r"\d[\W\d_]*|[A-Z]*[^\W\d_A-Z]+|[A-Z]+")

# The component that holds the per-process state of all processes but the first.
PROCESSES = "processes"


def escape(key: str) -> str:
    """Percent-encodes a key's special characters, such as ``/``; ``unescape`` reverses this."""
    if not key:
        return _EMPTY
    return _UNSAFE.sub(
        lambda m: "".join(f"%{b:02X}" for b in m[0].encode("utf-8", "surrogatepass")), key
    )


def unescape(part: str) -> str:
    """Returns the key whose escaped form is ``part``; reverses ``escape``."""
    if part == _EMPTY:
        return ""
    return re.sub(
        r"(?:%[0-9A-F]{2})+",
        lambda m: bytes.fromhex(m[0].replace("%", "")).decode("utf-8", "surrogatepass"),
        part,
    )


def key_text(key: object) -> str:
    """Returns a dict's key as text; a named tuple has a tuple's, because it is restored as one."""
    return str(tuple(key)) if isinstance(key, tuple) else str(key)


def key_texts(keys: Iterable[object]) -> list[str]:
    """Returns the keys of one dict as texts; 1 becomes "1 (int)" if "1" is a key too."""
    pairs = [(key, key_text(key)) for key in keys]
    counts = collections.Counter(text for _, text in pairs)
    if len(counts) == len(pairs):
        return [*counts]
    strings = {text for key, text in pairs if type(key) is str}
    texts = []
    for key, text in pairs:
        while type(key) is not str and (counts[text] > 1 or text in strings):
            text += f" ({type(key).__name__})"
        texts.append(text)
    return texts


def join(key_path: Iterable[object]) -> str:
    """Returns the name of the leaf at the given key path; escapes every key."""
    return _SEPARATOR.join(escape(str(key)) for key in key_path)


def split(name: str) -> tuple[str, ...]:
    """Returns the key path of a leaf's name, as a tuple of unescaped strings; reverses ``join``."""
    return tuple(unescape(part) for part in name.split(_SEPARATOR))


def is_name(text: str) -> bool:
    """Returns whether a text can be a leaf's name."""
    return bool(text) and not _FOREIGN.search(text)


def may_be_mistyped(a: str, b: str) -> bool:
    """Returns whether two names differ by case, punctuation, or one letter of a longer word.

    Names that differ by a number or a short word are variants: ``seed-3`` and ``seed-4``, ``lr_a``
    and ``lr_b``, ``mse`` and ``mae``.
    """
    words = [[word.lower() for word in _WORD.findall(text)] for text in (a, b)]
    if "".join(words[0]) == "".join(words[1]):
        return a != b
    changed = [sorted(pair, key=len) for pair in zip(*words, strict=False) if pair[0] != pair[1]]
    if len(words[0]) != len(words[1]) or len(changed) != 1 or not "".join(changed[0]).isalpha():
        return False
    short, long = changed[0]
    same = next((i for i, c in enumerate(short) if c != long[i]), len(short))
    a, b = short[same:], long[same:]
    is_swap = a[1::-1] + a[2:] == b
    # A first letter makes another word: rmse and mse, psnr and snr.
    return is_swap or (len(long) > 3 and same > 0 and b[1:] in (a, a[1:]))


def without_compile(fqn: str) -> str:
    """Returns torch's name of a tensor or module without what ``torch.compile`` puts into it."""
    if "_orig_mod" not in fqn:
        return fqn
    return ".".join(part for part in fqn.split(".") if part != "_orig_mod")


def of_process(index: int, name: str) -> str:
    """Returns the name of a leaf of process ``index`` that differs from that of process 0."""
    return _SEPARATOR.join((PROCESSES, str(index), name))


def without_process(name: str) -> str:
    """Removes the prefix ``processes/<index>/`` from a name; returns any other name unchanged."""
    component, rest = component_and_rest(name)
    return rest.partition(_SEPARATOR)[2] if component == PROCESSES else name


def component_and_rest(name: str) -> tuple[str, str]:
    """Splits a name at its first ``/`` into the component and the rest ("" if there is none)."""
    component, _, rest = name.partition(_SEPARATOR)
    return component, rest
