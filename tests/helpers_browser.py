"""What tests of pages in a browser share: Chromium, and which colors can be read."""

import contextlib
import re
import shutil

import numpy as np
from playwright.sync_api import sync_playwright

SWITCHES = """--no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync"""
SIZES = {"phone": {"width": 390, "height": 844}, "desk": {"width": 1280, "height": 900}}
READABLE, VISIBLE = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11
TEXTS = """() => {
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const own = walker.currentNode.parentElement, style = getComputedStyle(own), behind = [];
    const text = walker.currentNode.textContent.trim();
    if (!text || !own.checkVisibility() || own.closest('script, style, metadata, .sr')) continue;
    for (let each = own; each; each = each.parentElement)
      behind.push(getComputedStyle(each).backgroundColor);
    texts.push([text.slice(0, 200), own.closest('svg') ? style.fill : style.color, behind]);
  }
  return texts;
}"""


@contextlib.contextmanager
def chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    assert program, "there is no Chromium: apt-get install chromium"
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=program, args=SWITCHES.split())
        yield browser
        browser.close()


def rgba(text):
    """``rgb(1, 2, 3)`` or ``rgba(1, 2, 3, 0.5)`` as four shares."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", text)]
    return np.array([*(number / 255 for number in numbers[:3]), *numbers[3:], 1.0][:4])


def luminance(color):
    linear = np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    """The ratio of luminances, WCAG 2.2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def faint(texts, ground):
    """The contrasts of texts that cannot be read, from what ``TEXTS`` gives."""
    contrasts = {}
    for text, color, behind in texts:
        base = ground
        for layer in map(rgba, reversed(behind)):
            base = layer[3] * layer[:3] + (1 - layer[3]) * base
        contrasts[text] = contrast(rgba(color)[:3], base)
    return {text: ratio for text, ratio in contrasts.items() if ratio < READABLE}
