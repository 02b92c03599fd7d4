"""When a step is saved and which steps are kept; see ``torchax_ckpt.storage.policies``."""

from torchax_ckpt.storage.policies import *  # noqa: F403 - re-exported under its public name
from torchax_ckpt.storage.policies import __all__ as __all__
