"""Make the pictures of the README: pages of runs, as a browser shows them.

First run ``python -m jllama train quickstart`` and ``python -m jllama speedrun``, then, in the
repository with the packages of ``dev`` and Chromium, ``python docs/pictures.py``.
"""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

RUNS = Path("runs")
PICTURES = Path(__file__).parent / "pictures"
QUESTIONS = ("What is your name?", "Where do you live?", "List 17 and 25.")


def save(page: Page, name: str, selector: str) -> None:
    """Write a part of a page as a picture."""
    page.locator(selector).first.screenshot(path=PICTURES / f"{name}.png")


def save_chat(page: Page, checkpoint: Path) -> None:
    """Serve a model, ask it some questions on its page, and write the picture."""
    command = [sys.executable, "-m", "jllama", "serve", str(checkpoint), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        ready = next(line for line in lines if "ready" in line)
        match = re.match(r"http://\S+\d", ready)
        assert match, ready
        page.goto(match[0])
        for question in QUESTIONS:
            page.get_by_label("Message", exact=True).fill(question)
            page.get_by_label("Send", exact=True).click()
            page.wait_for_timeout(3000)
        page.screenshot(path=PICTURES / "chat.png")
        server.send_signal(signal.SIGTERM)


def main() -> None:
    """Write all pictures."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 620}, color_scheme="light")
        page.goto((RUNS / "quickstart/report.html").absolute().as_uri())
        save(page, "quickstart_loss", ".charts svg")
        page.goto((RUNS / "speedrun/report.html").absolute().as_uri())
        page.set_viewport_size({"width": 900, "height": 1262})
        page.screenshot(path=PICTURES / "report_card.png")
        page.set_viewport_size({"width": 900, "height": 620})
        save_chat(page, RUNS / "speedrun/rewards")
        browser.close()


if __name__ == "__main__":
    main()
