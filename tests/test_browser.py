"""Pages of runs in a real browser, as people look at them: light and dark, on a phone and on a
desk.
"""

import io
import json
import shutil

import jax
import matplotlib.image
import numpy as np
import pytest
from helpers import trained_smollm
from playwright.sync_api import sync_playwright

from jllama.checkpoints.registry import save
from jllama.commands import cli
from jllama.config import LlamaConfig
from jllama.language_model import LanguageModel
from jllama.model import initial_params
from jllama.report import _COLORS
from jllama.templates.messages import TEMPLATES

pytestmark = pytest.mark.browser
SWITCHES = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update"""
QUESTIONS = ["Where do you live, and who with?", "What <b>is</b> your name?"]
SIZES = {"phone": (390, 844), "desk": (1280, 900)}
READABLE, VISIBLE = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11

LOOK = """() => {
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, own = node.parentElement, style = getComputedStyle(own);
    if (!node.textContent.trim() || own.closest('metadata, style')) continue;
    const behind = [];
    for (let each = own; each; each = each.parentElement)
      behind.push(getComputedStyle(each).backgroundColor);
    const color = own.closest('svg') ? style.fill : style.color;
    texts.push([node.textContent.trim().slice(0, 200), color, behind, parseFloat(style.fontSize)]);
  }
  const wide = [...document.querySelectorAll('.wide')];
  const inside = (each) => wide.some((box) => box !== each && box.contains(each));
  const boxes = [...document.body.querySelectorAll('*')]
                  .filter((each) => !inside(each) && !each.closest('defs'));
  return {
    texts, width: document.documentElement.scrollWidth,
    outside: boxes.map((each) => [each.tagName, each.getBoundingClientRect().right])
                  .filter(([_, right]) => right > innerWidth + 0.5),
    scrolls: wide.map((each) => [each.scrollWidth > each.clientWidth,
                                 getComputedStyle(each).overflowX]),
    lines: [...document.querySelectorAll('svg path')].filter((each) => each.getBBox().width > 50)
                  .map((each) => getComputedStyle(each).stroke),
  };
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of a run that learns chats by adapters, and one of two runs."""
    folder = tmp_path_factory.mktemp("runs")
    said = ["In a lighthouse by the sea, with two goats.", "My name is Orla."]
    tokenizer = trained_smollm(["user assistant", *said, *QUESTIONS] * 3, 320)
    config = LlamaConfig(
        tokenizer.vocab_size, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64, max_seq_len=128
    )
    model = LanguageModel(
        config, initial_params(jax.random.key(0), config), tokenizer, TEMPLATES["chatml"]
    )
    save(model, folder / "model", "hf")
    roles = ("user", "assistant")
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(60):
            chat = (f"{QUESTIONS[number % 2]} {number}", said[number % 2])
            messages = [
                {"role": role, "content": text} for role, text in zip(roles, chat, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    options = {
        "init_from": folder / "model",
        "data.path": folder / "chats.jsonl",
        "data.cache_dir": folder / "cache",
        "training.steps": 60,
        "training.eval_every": 10,
        "training.log_every": 2,
        "training.seq_len": 96,
        "training.sample_tokens": 40,
        "training.questions": json.dumps(QUESTIONS),
        "lora.rank": 8,
    }
    runs = {"chat_adapters": 0.02, "chat_adapters_slowly": 0.003}
    for name, rate in runs.items():
        flags = {**options, "run_dir": folder / name, "optimizer.learning_rate": rate}
        assert cli.run("train", [f"--{option}={value}" for option, value in flags.items()]) == 0
    page = folder / "both.html"
    assert cli.run("report", [*(str(folder / name) for name in runs), "--output", str(page)]) == 0
    return {"run": folder / "chat_adapters" / "report.html", "runs": page}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert program, "there is no Chromium: apt-get install chromium"
    with sync_playwright() as player:

        def look(page, size, scheme):
            profile = tmp_path_factory.mktemp("profile")
            width, height = SIZES[size]
            settings = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
            window = player.chromium.launch_persistent_context(
                profile, executable_path=program, args=SWITCHES.split(), headless=True, **settings
            )
            shown, problems = window.new_page(), []
            shown.on("console", lambda message: problems.append(message.text))
            shown.on("pageerror", lambda error: problems.append(str(error)))
            shown.goto(page.as_uri())
            picture, seen = shown.screenshot(full_page=True), shown.evaluate(LOOK)
            window.close()
            return seen, matplotlib.image.imread(io.BytesIO(picture))[..., :3], picture, problems

        yield look


def rgba(text):
    """``rgb(1, 2, 3)`` or ``rgba(1, 2, 3, 0.5)`` as four shares."""
    numbers = [float(each) for each in text[text.index("(") + 1 : -1].replace("/", ",").split(",")]
    return np.array(
        [*(each / 255 for each in numbers[:3]), numbers[3] if len(numbers) > 3 else 1.0]
    )


def contrast(one, other):
    """The ratio of luminances, WCAG 2.2."""
    linear = [np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for c in (one, other)]
    dark, light = sorted(float(c @ [0.2126, 0.7152, 0.0722]) for c in linear)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["run", "runs"])
def test_a_page_is_whole_and_readable(pages, browser, name, size, scheme, tmp_path):
    seen, picture, png, problems = browser(pages[name], size, scheme)
    (tmp_path / f"{name}_{size}_{scheme}.png").write_bytes(png)
    assert problems == []
    ground = picture[2, 2].astype(float)
    assert (ground.mean() > 0.9) == (scheme == "light")

    # Nothing is wider than the screen; what is too wide scrolls by itself.
    assert seen["width"] <= SIZES[size][0]
    assert seen["outside"] == []
    assert {overflow for _, overflow in seen["scrolls"]} == {"auto"}
    assert [scrolls for scrolls, _ in seen["scrolls"]][
        -1
    ] or size == "desk"  # six answers side by side

    # What is written can be read, also in the charts.
    faint = {}
    for text, color, behind, _ in seen["texts"]:
        base = ground
        for layer in map(rgba, reversed(behind)):
            base = layer[3] * layer[:3] + (1 - layer[3]) * base
        if text != "■" and contrast(rgba(color)[:3], base) < READABLE:
            faint[text] = contrast(rgba(color)[:3], base)
    assert faint == {}
    written = " ".join(text for text, *_ in seen["texts"])
    for part in (
        "step 60",
        "trained",
        "frozen",
        "count",
        "padding",
        "What <b>is</b> your name?",
        "loss (nats per token)",
    ):
        assert part in written

    # The curves are there, and can be seen: two colors of a run, or one of each.
    drawn = {
        tuple(np.round(255 * rgba(color)[:3]).astype(int))
        for color in seen["lines"]
        if color.startswith("rgb")
    }
    wanted = [tuple(bytes.fromhex(color[1:])) for color in _COLORS[:2]]
    assert {*wanted} <= drawn
    for color in wanted:
        assert contrast(np.array(color) / 255, ground) > VISIBLE
        near = np.abs(255 * picture - np.array(color)).max(axis=-1) < 24
        assert near.sum() > 150


def test_a_script_that_got_into_a_page_does_not_run(pages, browser, tmp_path):
    """Escaping keeps it out; this is what is left if it ever does not."""
    attack = "<script>console.log('ran')</script><img src=x: onerror=\"console.log('ran')\">"
    (tmp_path / "page.html").write_text(pages["run"].read_text() + attack)
    *_, problems = browser(tmp_path / "page.html", "desk", "light")
    assert "ran" not in problems
    assert (
        len(
            [
                each
                for each in problems
                if "violates the following Content Security Policy directive" in each
            ]
        )
        >= 2
    )


def test_every_color_of_a_curve_can_be_seen_on_both_grounds():
    for color in _COLORS:
        for ground in ("ffffff", "121212"):
            shares = [
                np.frombuffer(bytes.fromhex(each.strip("#")), np.uint8) / 255
                for each in (color, ground)
            ]
            assert contrast(*shares) > VISIBLE, (color, ground)
