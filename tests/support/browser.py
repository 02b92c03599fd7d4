"""A program that loads a page in Qt's Chromium without a screen: ``python browser.py SETTINGS``.

SETTINGS are JSON. The program prints a JSON object about the loaded page: sizes, texts, console
messages and requests. It is a process of its own, because a browser needs the main thread and reads
its settings at start-up.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_LOOK = """(() => {
  const shown = [...document.querySelectorAll("svg")].filter(s => s.getClientRects().length);
  const texts = shown.flatMap((s, i) => [...s.querySelectorAll("text")].map(t => {
    const box = t.getBoundingClientRect(), home = s.getBoundingClientRect();
    return {text: t.textContent, drawing: i, height: box.height,
            left: box.left, right: box.right, top: box.top, bottom: box.bottom,
            inside: box.left >= home.left - 1 && box.right <= home.right + 1
              && box.top >= home.top - 1 && box.bottom <= home.bottom + 1};
  }));
  return JSON.stringify({
    title: document.title,
    width: window.innerWidth,
    scroll_width: document.documentElement.scrollWidth,
    num_drawings: shown.length,
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
    text: document.body.innerText,
    scripted: "scripted" in window,
    texts,
  });
})()"""


def look(settings: dict[str, Any]) -> int:
    """Loads a page and prints its properties; returns Qt's exit code, or 3 after a minute."""
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    # Neither root nor a container can set up a sandbox.
    os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"
    # Without a screen, Qt does not pass its color scheme to Chromium.
    scheme = "--blink-settings=preferredColorScheme=0" if settings.get("dark") else ""
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = f"--disable-gpu --hide-scrollbars {scheme}"
    os.environ["QT_SCALE_FACTOR"] = str(settings.get("scale", 1))
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtWebEngineCore import (
        QWebEnginePage,
        QWebEngineProfile,
        QWebEngineUrlRequestInterceptor,
    )
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    requests: list[str] = []
    messages: list[str] = []

    class Requests(QWebEngineUrlRequestInterceptor):
        def interceptRequest(self, info: Any) -> None:  # noqa: N802 - Qt's name
            requests.append(info.requestUrl().toString())

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, *said: Any) -> None:  # noqa: N802 - Qt's name
            messages.append(str(said[1]))

    app = QApplication(sys.argv[:1])
    interceptor, profile = Requests(), QWebEngineProfile()
    profile.setUrlRequestInterceptor(interceptor)
    page = Page(profile)
    view = QWebEngineView()
    view.setPage(page)
    view.resize(settings["width"], settings.get("height", 800))
    view.show()

    def end(is_loaded: bool, found: str) -> None:
        if "screenshot" in settings:
            view.grab().save(settings["screenshot"])
        seen = {"is_loaded": is_loaded, "requests": requests, "messages": messages}
        print(json.dumps({**json.loads(found), **seen}))
        app.exit(0)

    def loaded(is_loaded: bool) -> None:
        # More time than painting takes.
        then = lambda found: QTimer.singleShot(400, lambda: end(is_loaded, found))  # noqa: E731
        page.runJavaScript(_LOOK, then)

    page.loadFinished.connect(loaded)
    page.load(QUrl.fromLocalFile(settings["page"]))
    QTimer.singleShot(60_000, lambda: app.exit(3))
    code = app.exec()
    view.setPage(None)
    page.deleteLater()  # Qt requires that the page is deleted before its profile.
    app.processEvents()
    return code


if __name__ == "__main__":
    sys.exit(look(json.loads(sys.argv[1])))
