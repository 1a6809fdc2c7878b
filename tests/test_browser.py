"""Pages of runs in a real browser, as people look at them: light and dark, on a phone and on a
desk.
"""

import contextlib
import io
import json

import jax
import matplotlib.image
import numpy as np
import pytest
from helpers import trained_smollm
from helpers_browser import SIZES, TEXTS, VISIBLE, chromium, contrast, faint, rgba
from roads import write_settings

from jllama.commands import cli
from jllama.core.config import LlamaConfig
from jllama.core.model import initial_params
from jllama.formats.registry import save
from jllama.models.language_model import LanguageModel
from jllama.templates.messages import TEMPLATES
from jllama.training.report import COLORS

pytestmark = pytest.mark.browser
QUESTIONS = ["Where do you live, and who with?", "What <b>is</b> your name?"]
RUN_WORDS = (
    "step 60",
    "trained",
    "frozen",
    "count",
    "padding",
    "loss (nats per token)",
    QUESTIONS[1],
)
WORDS = {
    "run": RUN_WORDS,
    "runs": RUN_WORDS,
    "card": (
        *("Depth 1", "base", "chat", "rewards", "flops", "elapsed s", "bits per byte"),
        *("loss (nats per token)", "reward", "minutes", "held out reward", "What is your name?"),
        *("make a larger one", "python -m jllama chat run/rewards"),
    ),
}
LOOK = """() => {
  const wide = [...document.querySelectorAll('.wide')];
  const inside = (each) => wide.some((box) => box !== each && box.contains(each));
  const boxes = [...document.body.querySelectorAll('*')]
                  .filter((each) => !inside(each) && !each.closest('defs'));
  return {
    width: document.documentElement.scrollWidth,
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
    """The page of a run that learns chats by adapters, one of two runs, and a report card."""
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
    with contextlib.chdir(folder):
        write_settings(folder)
        assert cli.run("speedrun", ["--config", "road.yaml"]) == 0
    card = folder / "run" / "report.html"
    return {"run": folder / "chat_adapters" / "report.html", "runs": page, "card": card}


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:

        def look(page, size, scheme):
            context = browser.new_context(viewport=SIZES[size], color_scheme=scheme)
            shown, problems = context.new_page(), []
            shown.on("console", lambda message: problems.append(message.text))
            shown.on("pageerror", lambda error: problems.append(str(error)))
            shown.goto(page.as_uri())
            png = shown.screenshot(full_page=True)
            seen = shown.evaluate(LOOK) | {"texts": shown.evaluate(TEXTS)}
            context.close()
            return seen, png, problems

        yield look


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WORDS)
def test_a_page_is_whole_and_readable(pages, browser, name, size, scheme, tmp_path):
    seen, png, problems = browser(pages[name], size, scheme)
    (tmp_path / f"{name}_{size}_{scheme}.png").write_bytes(png)
    picture = matplotlib.image.imread(io.BytesIO(png))[..., :3]
    assert problems == []
    ground = picture[2, 2].astype(float)
    assert (ground.mean() > 0.9) == (scheme == "light")

    # Nothing is wider than the screen; what is too wide scrolls by itself.
    assert seen["width"] <= SIZES[size]["width"]
    assert seen["outside"] == []
    assert {overflow for _, overflow in seen["scrolls"]} == {"auto"}
    last_scrolls, _ = seen["scrolls"][-1]
    assert last_scrolls or size == "desk" or name == "card"  # six answers side by side

    # What is written can be read, also in the charts.
    assert faint([text for text in seen["texts"] if text[0] != "■"], ground) == {}
    written = " ".join(text for text, *_ in seen["texts"])
    for word in WORDS[name]:
        assert word in written

    # The curves are there, and can be seen: two colors of a run, or one of each.
    strokes = (rgba(color)[:3] for color in seen["lines"] if color.startswith("rgb"))
    drawn = {tuple(np.round(255 * color).astype(int)) for color in strokes}
    for color in (tuple(bytes.fromhex(color[1:])) for color in COLORS[:2]):
        assert color in drawn
        assert contrast(np.array(color) / 255, ground) > VISIBLE
        near = np.abs(255 * picture - np.array(color)).max(axis=-1) < 24
        assert near.sum() > (30 if name == "card" else 150)  # whose second curve is of two points


def test_a_script_that_got_into_a_page_does_not_run(pages, browser, tmp_path):
    """Escaping keeps it out; this is what is left if it ever does not."""
    attack = "<script>console.log('ran')</script><img src=x: onerror=\"console.log('ran')\">"
    (tmp_path / "page.html").write_text(pages["run"].read_text() + attack)
    *_, problems = browser(tmp_path / "page.html", "desk", "light")
    assert "ran" not in problems
    said = "violates the following Content Security Policy directive"
    assert len([problem for problem in problems if said in problem]) >= 2


@pytest.mark.parametrize("ground", ["ffffff", "121212"])
def test_every_color_of_a_curve_can_be_seen(ground):
    for color in COLORS:
        one, other = (
            np.frombuffer(bytes.fromhex(text), np.uint8) / 255 for text in (color[1:], ground)
        )
        assert contrast(one, other) > VISIBLE, color
