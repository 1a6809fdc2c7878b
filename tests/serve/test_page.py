"""The web page in a real browser, as people use it, with a server that answers as OpenAI's does."""

import asyncio
import json
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from helpers_browser import SIZES, TEXTS, chromium, faint, luminance, rgba
from helpers_serve import listening, serving, started, wait_for
from playwright.sync_api import expect

import jllama.serve

pytestmark = pytest.mark.browser
PAGE = Path(jllama.serve.__file__).with_name("page.html")
POLICY = """default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src
'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"""
HOSTILE = """<script>window.ran = 1</script><img src=x onerror="window.ran = 1"><b>bold?</b>

<iframe src="https://example.com"></iframe> &lt;entity&gt; <style>body { display: none }</style>

[a](javascript:window.ran=1) [b](JaVaScRiPt:window.ran=1) [c](data:text/html,<script>window.ran=1</script>)
[d](java\tscript:window.ran=1) [e](vbscript:x) [f](//example.com) [good](https://example.com/a_(b)?q=1#x) <javascript:x>
![picture](https://example.com/spy.png) https://example.com/"onmouseover="window.ran=1 `<script>window.ran=1</script>`

| <img src=x onerror=window.ran=1> | **<svg onload=window.ran=1>** |
|---|---|
| [x](javascript:window.ran=1) | <a href="javascript:window.ran=1">y</a> |

```html"><script>window.ran=1</script>
</code></pre><script>window.ran = 1</script>
```

> # <img src=x onerror=window.ran=1>
> - <object data=x> [__proto__](javascript:window.ran=1)"""  # noqa: E501
RICH = """# A heading

Some **bold**, *italic*, ***both***, ~~gone~~, `code`, snake_case_name, 2 * 3 * 4 and a [link](https://example.com).
A second line \\*with\\* escapes.

1. first
   - inner `x`
   - inner two

     with a paragraph

     ```
     in a list

       and more
     ```
2. second
```python
def f(x):
    return "<b>" + x  # **not bold**
```

> quoted **text**
> > deeper

| left | right | center |
|:-----|------:|:------:|
| a \\| b | 1 | *c* |
| short |

---
The end: https://example.com/page."""
WORDS = (
    "The lighthouse keeper counted the ships again, as on every evening, and wrote their "
    "names into his book."
)


class Fake:
    """A server whose answers follow from the last message; ``seen`` are requests for answers."""

    def __init__(self):
        self.key, self.loading, self.models = None, False, ["tiny", "pirate"]
        self.seen, self.left = [], 0
        self.hold = threading.Event()  # an answer to "wait" goes on when it is set
        self.app = FastAPI()
        self.app.add_route("/", self.page)
        self.app.add_route("/health", self.health)
        self.app.add_route("/v1/models", self.list_models)
        self.app.add_route("/v1/chat/completions", self.chat, methods=["POST"])

    def refuse(self, status, message, **headers):
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": error}, status, headers)

    def refusal(self, request):
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return self.refuse(401, "Wrong key.")
        return None

    async def page(self, request):
        headers = {"Content-Security-Policy": POLICY.replace("\n", " ")}
        return HTMLResponse(PAGE.read_bytes(), headers=headers)

    async def health(self, request):
        if self.loading:
            return self.refuse(503, "Loading the weights.")
        return JSONResponse({"status": "ok"})

    async def list_models(self, request):
        common = {"object": "model", "created": 0, "owned_by": "x"}
        data = [{"id": name} | common for name in self.models]
        return self.refusal(request) or JSONResponse({"object": "list", "data": data})

    async def chat(self, request):
        if refused := self.refusal(request):
            return refused
        body = await request.json()
        self.seen.append(body)
        question = body["messages"][-1]["content"]
        if question == "busy":
            return self.refuse(503, "the queue is full", **{"Retry-After": "7"})
        if question == "bad":
            return self.refuse(400, "The prompt has 9000 tokens, and the context holds 2048.")
        return StreamingResponse(self.stream(body, question), media_type="text/event-stream")

    async def stream(self, body, question):
        texts = {"hostile": HOSTILE, "rich": RICH, "lines": "\n\n".join([WORDS] * 60)}
        texts["wait"] = WORDS
        parts = re.findall(r"\s*\S+", texts.get(question, f"Answer to {question} 🦙."))
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0}
        head |= {"model": body["model"], "system_fingerprint": "fp_0123"}

        def event(choices, **more):
            data = {**head, "choices": choices, **more}
            return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"

        def delta(finish=None, **fields):
            return event([{"index": 0, "delta": fields, "finish_reason": finish}])

        try:
            yield ": ping\n\n" + delta(role="assistant", content="")
            for number, part in enumerate(parts):
                while number == 3 and question == "wait" and not self.hold.is_set():
                    await asyncio.sleep(0.02)
                if number == 3 and question == "fail":
                    problem = {"message": "The device was lost.", "type": "server_error"}
                    yield f"data: {json.dumps({'error': problem})}\n\n"
                    return
                raw = delta(content=part).encode()
                for cut in (raw[: len(raw) // 2], raw[len(raw) // 2 :]):  # also through a character
                    yield cut
                    await asyncio.sleep(0)
            yield delta("stop")
            usage = {"prompt_tokens": 12, "completion_tokens": len(parts)}
            usage["total_tokens"] = 12 + len(parts)
            yield event([], usage=usage | {"prompt_tokens_details": {"cached_tokens": 8}})
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise


@pytest.fixture
def fake():
    fake = Fake()
    with serving(fake.app) as (fake.url, _):
        yield fake
        fake.hold.set()


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


class Person:
    """Someone at the page. ``problems`` is what the console said, ``elsewhere`` what was fetched
    from other servers."""

    def __init__(self, browser, url, size="desk", **settings):
        self.url, self.problems, self.elsewhere = url, [], []
        self.context = browser.new_context(
            viewport=SIZES[size], has_touch=size == "phone", **settings
        )
        self.context.on("request", self.note)
        self.page = self.tab()
        self.answers = self.page.get_by_role("article", name="Answer")
        self.body = self.answers.last.locator(".body")
        self.asked = self.page.get_by_role("article", name="You")
        self.names = self.page.locator("#list .name")

    def note(self, request):
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def tab(self):
        page = self.context.new_page()
        page.set_default_timeout(300_000)
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.goto(self.url)
        return page

    def send(self, text, page=None):
        field = (page or self.page).get_by_role("textbox", name="Message", exact=True)
        field.fill(text)
        field.press("Enter")

    def ask(self, text):
        """Send, and wait for the end of the answer."""
        before = self.asked.count()
        self.send(text)
        expect(self.asked).to_have_count(before + 1)
        expect(self.page.locator("#log > .assistant:last-child")).to_have_attribute(
            "aria-busy", "false"
        )

    def wait(self):
        """Send what is answered by half, and wait for that half."""
        self.send("wait")
        expect(self.answers.last).to_contain_text("The lighthouse keeper")

    def set(self, numbers, system=None):
        """Fill fields of the settings."""
        self.button("Settings").click()
        for label, value in numbers.items():
            self.page.get_by_role("spinbutton", name=label).fill(str(value))
        if system is not None:
            self.page.get_by_label("System prompt").fill(system)
        self.page.keyboard.press("Escape")

    def button(self, name, **options):
        return self.page.get_by_role("button", name=name, **options)


@pytest.fixture
def person(browser, fake):
    """Opens the page, and looks in the end whether the browser had anything to complain about."""
    people = []

    def come(*args, url=fake.url, **settings):
        people.append(Person(browser, url + "/", *args, **settings))
        return people[-1]

    yield come
    for one in people:
        one.context.close()
        # A browser notes every refusal of a server as an error of its own.
        own = "Failed to load resource"
        assert [problem for problem in one.problems if not problem.startswith(own)] == []
        assert one.elsewhere == []


def test_it_is_one_small_file_that_parses_no_markup():
    text = PAGE.read_text()
    assert len(text.encode()) < 60_000
    markup = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\(|new Function|srcdoc"
    )
    fetched = (
        r"""(?:src|href)=["']?(?:https?:)?//|url\(|@import|"""
        r"""<link(?! rel="icon" href="data:)|<script ."""
    )
    assert not re.search(markup, text)
    assert not re.search(fetched, text)


def test_send_stream_and_what_is_sent(person, fake):
    one = person()
    one.wait()
    expect(one.answers.last).not_to_contain_text("counted")
    expect(one.button("Stop")).to_be_visible()
    one.page.wait_for_timeout(600)  # an answer that takes less has no speed to speak of
    fake.hold.set()
    expect(one.body).to_have_text(WORDS)
    expect(one.answers.last).to_contain_text("18 tokens")
    expect(one.answers.last).to_contain_text("tokens/s")
    (body,) = fake.seen
    seed = body.pop("seed")
    assert seed >= 0
    details = one.answers.last.locator(".facts").get_attribute("title")
    for part in ("tiny", f"seed {seed}", "prompt of 12 tokens, 8 from the cache", "fp_0123"):
        assert part in details
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "wait"}],
        "temperature": 0.7,
        "top_p": 0.95,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    one.ask("and then?")
    assert [message["role"] for message in fake.seen[1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    assert fake.seen[1]["messages"][1]["content"] == WORDS
    expect(one.body).to_have_text("Answer to and then? 🦙.")
    assert one.problems == []


def test_stop_keeps_what_came(person, fake):
    one = person()
    one.wait()
    one.button("Stop").click()
    expect(one.answers.last).to_contain_text("Stopped")
    expect(one.body).to_have_text("The lighthouse keeper")
    wait_for(lambda: fake.left == 1)
    one.ask("on")
    assert fake.seen[1]["messages"][1] == {"role": "assistant", "content": "The lighthouse keeper"}


def test_a_reload_keeps_everything_also_half_an_answer(person, fake):
    one = person()
    one.ask("first")
    one.wait()
    one.page.reload()
    expect(one.answers).to_have_count(2)
    expect(one.body).to_have_text("The lighthouse keeper")
    expect(one.answers.last).to_contain_text("Broken off when the page was closed")
    expect(one.page.get_by_role("heading", name="first", exact=True)).to_be_visible()
    fake.hold.set()
    one.button("Answer again").last.click()
    expect(one.body).to_have_text(WORDS)


def test_edit_and_resend_replaces_the_rest_and_can_be_undone(person, fake):
    one = person()
    texts = ["one", "two", "three"]
    for text in texts:
        one.ask(text)
    edit = one.asked.nth(1).get_by_role("button", name="Edit and send again")
    edit.click()
    field = one.page.get_by_role("textbox", name="Edit the message")
    expect(field).to_be_focused()
    field.press("Escape")
    expect(one.asked.nth(1)).to_have_text("two")
    edit.click()
    field.fill("2")
    field.press("Enter")
    expect(one.body).to_have_text("Answer to 2 🦙.")
    expect(one.asked).to_have_text(["one", "2"])
    sent = [message["content"] for message in fake.seen[-1]["messages"]]
    assert sent == ["one", "Answer to one 🦙.", "2"]
    one.button("Undo").click()
    expect(one.asked).to_have_text(texts)
    one.page.reload()
    expect(one.asked).to_have_text(texts)


def test_regenerate_draws_another_seed(person, fake):
    one = person()
    one.ask("one")
    for _ in range(2):
        one.answers.last.get_by_role("button", name="Answer again").click()
        expect(one.answers.last).to_have_attribute("aria-busy", "false")
    wait_for(lambda: len(fake.seen) == 3)
    assert len({body["seed"] for body in fake.seen}) == 3
    expect(one.answers).to_have_count(1)


def test_text_of_the_model_never_runs(person):
    one = person()
    one.ask("hostile")
    written = one.body.inner_text()
    for part in """<script>window.ran = 1</script><img
        <iframe
        &lt;entity
        [a](javascript:
        </code></pre>""".splitlines():
        assert part.strip() in written
    elements = "(body) => [...body.querySelectorAll('*')]"
    tags = one.body.evaluate(f"{elements}.map((each) => each.tagName)")
    known = """P BR A CODE TABLE THEAD TBODY TR TH TD STRONG EM PRE DIV SPAN BUTTON BLOCKQUOTE H3 UL
    LI svg use"""
    assert set(tags) <= set(known.split())
    links = one.body.locator("a").evaluate_all(
        "(all) => all.map((each) => [each.href, each.rel, each.target])"
    )
    paths = ("", "a_(b)?q=1#x", "spy.png", "")
    assert links == [
        [f"https://example.com/{path}", "noopener noreferrer", "_blank"] for path in paths
    ]
    names = one.body.evaluate(f"{elements}.flatMap((each) => each.getAttributeNames())")
    assert not [name for name in names if name.startswith("on") or name in ("src", "srcset")]
    one.page.wait_for_timeout(200)
    assert one.page.evaluate("window.ran") is None
    one.page.reload()
    expect(one.answers.last).to_have_attribute("aria-busy", "false")
    assert one.page.evaluate("window.ran") is None
    assert one.problems == []
    # A name from the store is text, too.
    name = "<img src=x onerror=window.ran=1>"
    one.names.hover()
    one.button("Rename").click()
    one.page.keyboard.type(name)
    one.page.keyboard.press("Enter")
    expect(one.names).to_have_text([name])
    assert one.page.evaluate("window.ran") is None


def test_markdown_is_shown(person):
    one = person()
    one.ask("rich")
    body = one.body
    for selector, text in {
        "h3": "A heading",
        "p > strong": "bold",
        "p > em": "italic",
        "em > strong": "both",
        "s": "gone",
        "ol > li > ul > li:first-child": "inner x",
        "ol > li > ul > li:nth-child(2) > p": "with a paragraph",
        "li pre": "in a list\n\n  and more",
        "ol > li:nth-child(2)": "second",
        "div:not(li *) > pre code": 'def f(x):\n    return "<b>" + x  # **not bold**',
        ".code:not(li *) .code-head span": "python",
        "blockquote > blockquote": "deeper",
        "tbody tr:first-child td:first-child": "a | b",
        "tbody tr:first-child em": "c",
    }.items():
        assert body.locator(selector).first.inner_text() == text, selector
    assert body.locator("hr").count() == 1
    assert "snake_case_name, 2 * 3 * 4" in body.inner_text()
    assert "A second line *with* escapes." in body.inner_text()
    links = body.locator("a").evaluate_all("(all) => all.map((each) => each.href)")
    assert links == ["https://example.com/", "https://example.com/page"]


REPEATED = ["*a ", "[", "> ", "- ", "_a_b ", "![[](", "https://", "**", "***a** b* ", "```\n"]
LONG = [
    *(mark * (90_000 // len(mark)) for mark in REPEATED),
    "`" * 300 + "x" * 1000 + " ``" * 20_000,
    "|" * 50_000 + "\n" + "|-" * 25_000,
    "# " + " #" * 40_000,
    "\n".join("  " * depth + "- x" for depth in range(400)),
]


def test_long_texts_of_marks_are_shown(person):
    one = person()
    for text in LONG:
        one.page.evaluate("(text) => showMarkdown(make('div'), text)", text)


MARKS = r"```;~~~;- ;1. ;2) ;> ;# ;|;|-;:-:|;**;*;_;`;~~;\;[a](;https://a.b/;)"


def test_a_text_that_grows_is_shown_as_if_it_came_at_once(person):
    one = person()
    draw = random.Random(0)
    marks = MARKS.split(";")
    words = ["word", "two words", " ", "  ", "    ", "<b>", "&amp;", "é🦙", "---"]
    parts = [*marks * 2, *words, *["\n"] * 8, "\n\n", "\t", "\r\n"]
    texts = ["".join(draw.choices(parts, k=40)) for _ in range(300)] + [RICH, HOSTILE]
    wrong = one.page.evaluate(
        """(texts) => texts.filter((text) => {
          const grown = make('div'), whole = make('div');
          for (let end = 0; end < text.length; end += 3) showMarkdown(grown, text.slice(0, end));
          showMarkdown(grown, text);
          showMarkdown(whole, text);
          return grown.outerHTML !== whole.outerHTML;
        })""",
        texts,
    )
    assert wrong == []


# A browser has no clipboard for pages of http elsewhere.
@pytest.mark.parametrize("is_secure", [True, False])
def test_copy(person, is_secure):
    one = person(permissions=["clipboard-read", "clipboard-write"])
    if not is_secure:
        one.page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    one.ask("rich")
    field = one.page.get_by_role("textbox", name="Message", exact=True)
    for button, text in (
        (".code-head button", 'def f(x):\n    return "<b>" + x  # **not bold**'),
        (".foot [aria-label=Copy]", RICH),
    ):
        said = one.page.locator("#said")
        # Otherwise the last click's word is read.
        said.evaluate("(element) => (element.textContent = '')")
        one.answers.last.locator(button).last.click()
        expect(said).to_have_text("Copied")
        field.fill("")
        field.press("Control+v")
        expect(field).to_have_value(text)


def test_the_key_is_asked_for_and_kept(person, fake):
    fake.key = "s3cret"
    one = person()
    dialog = one.page.get_by_role("dialog")
    expect(dialog).to_contain_text("This server wants an API key.")
    expect(dialog).to_contain_text("Kept in this browser")
    dialog.get_by_label("Key").fill("wrong")
    dialog.get_by_label("Key").press("Enter")
    expect(dialog).to_contain_text("refused the API key")
    dialog.get_by_label("Key").fill("s3cret")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_be_hidden()
    one.ask("hello")
    one.page.reload()
    one.ask("again")
    expect(one.body).to_have_text("Answer to again 🦙.")
    one.button("Settings").click()
    one.button("Forget the API key").click()
    one.page.keyboard.press("Escape")
    assert one.page.evaluate("localStorage.getItem('jllama.key')") is None
    one.send("more")
    expect(dialog).to_contain_text("This server wants an API key.")
    dialog.get_by_role("button", name="Cancel").click()
    expect(one.answers.last).to_contain_text("Wrong key.")


def test_two_conversations_rename_delete_undo(person, fake):
    one = person()
    one.ask("about goats")
    one.page.keyboard.press("Control+k")
    expect(one.answers).to_have_count(0)
    one.ask("about ships")
    expect(one.names).to_have_text(["about ships", "about goats"])
    one.names.nth(1).click()
    expect(one.asked).to_have_text(["about goats"])
    in_list(one.page, "about goats", "Rename").click()
    one.page.keyboard.type("Goats")
    one.page.keyboard.press("Enter")
    expect(one.names).to_have_text(["about ships", "Goats"])
    in_list(one.page, "Goats", "Delete").click()
    expect(one.names).to_have_text(["about ships"])
    expect(one.answers).to_have_count(0)
    one.button("Undo").click()
    for _ in range(2):
        expect(one.names).to_have_text(["about ships", "Goats"])
        expect(one.asked).to_have_text(["about goats"])
        one.page.reload()


def in_list(page, conversation, button):
    item = page.get_by_role("listitem").filter(has_text=conversation)
    return item.get_by_role("button", name=button)


def test_an_answer_goes_on_while_another_conversation_is_read(person, fake):
    one = person()
    one.wait()
    one.page.keyboard.press("Control+k")
    one.ask("other")
    fake.hold.set()
    one.names.filter(has_text="wait").click()
    expect(one.body).to_have_text(WORDS)


def test_export_and_import(person, tmp_path):
    one = person()
    one.ask("hello")
    with one.page.expect_download() as download:
        one.button("Export", exact=True).click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    (kept,) = json.loads(path.read_text())["conversations"]
    assert [each["content"] for each in kept["messages"]] == ["hello", "Answer to hello 🦙."]
    other = person()
    other.page.locator("#file").set_input_files(path)
    expect(other.asked).to_have_text(["hello"])
    bad = tmp_path / "bad.json"
    bad.write_text('{"conversations": [{"messages": [{"role": "user", "content": {"a": 1}}]}]}')
    other.page.locator("#file").set_input_files(bad)
    expect(other.page.locator("#toast")).to_contain_text("bad.json holds no conversations")
    expect(other.names).to_have_count(1)


def test_settings_are_sent_and_kept(person, fake):
    one = person()
    expect(one.page.get_by_label("Model")).to_have_value("tiny")
    labels = {"Temperature": 0.5, "Top p": 0.9, "Top k": 40, "Min p": 0.05}
    labels |= {"Max tokens": 64, "Seed": 7}
    penalties = {"Repetition": 1.1, "Presence": -0.5, "Frequency": 0.2}
    fields = {label.lower().replace(" ", "_"): value for label, value in labels.items()}
    fields |= {f"{label.lower()}_penalty": value for label, value in penalties.items()}
    one.set(labels | penalties, system="Be brief.")
    one.page.get_by_label("Model").select_option("pirate")
    one.ask("hello")
    one.page.reload()
    one.button("New conversation").click()
    one.ask("again")
    for body in fake.seen:
        assert fields.items() <= body.items()
        assert body["model"] == "pirate"
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    one.button("Settings").click()
    one.button("Reset to defaults").click()
    one.button("Close").click()
    one.ask("plain")
    plain = {"model", "messages", "seed", "temperature", "top_p", "stream", "stream_options"}
    assert set(fake.seen[-1]) == plain
    assert (fake.seen[-1]["temperature"], fake.seen[-1]["top_p"]) == (0.7, 0.95)


def test_refusals_and_failures_are_said_and_can_be_tried_again(person, fake):
    one = person()
    one.send("busy")
    expect(one.answers.last).to_contain_text("The queue is full. Try again in 7 s.")
    one.button("Try again").click()
    wait_for(lambda: len(fake.seen) == 2)
    one.ask("hello")  # what got no answer goes along: roles take turns
    assert fake.seen[-1]["messages"] == [{"role": "user", "content": "busy\n\nhello"}]
    one.ask("bad")
    expect(one.answers.last).to_contain_text(
        "The prompt has 9000 tokens, and the context holds 2048."
    )
    one.page.keyboard.press("Control+k")
    one.ask("fail")
    expect(one.answers.last).to_contain_text("The device was lost.")
    expect(one.body).to_have_text("Answer to fail")
    one.page.context.set_offline(True)
    one.ask("away")
    expect(one.answers.last).to_contain_text("The server cannot be reached.")
    expect(one.page.locator("#state")).to_contain_text("The server cannot be reached.")
    one.page.context.set_offline(False)
    expect(one.page.locator("#state")).to_be_hidden()
    one.button("Try again").last.click()
    expect(one.body).to_have_text("Answer to away 🦙.")


def test_it_says_that_the_model_is_loading(person, fake):
    fake.loading = True
    one = person()
    expect(one.page.locator("#state")).to_have_text("Loading the weights.")
    fake.loading = False
    expect(one.page.locator("#state")).to_be_hidden()
    expect(one.page.get_by_label("Model")).to_have_value("tiny")


def test_two_tabs_keep_each_others_conversations(person, fake):
    one = person()
    one.ask("in one")
    other = one.tab()
    one.send("in other", other)
    expect(one.names).to_have_text(["in other", "in one"])
    other.locator("#list .name").nth(1).click()
    one.send("wait")
    last = other.get_by_role("article", name="Answer").last
    expect(last).to_contain_text("The lighthouse keeper")
    one.send("me too", other)
    expect(other.locator("#toast")).to_contain_text("is being answered in another tab")
    fake.hold.set()
    expect(last).to_contain_text(WORDS)
    expect(last).to_contain_text("18 tokens")
    in_list(other, "in other", "Delete").click()
    expect(one.names).to_have_text(["in one"])
    one.page.reload()
    expect(one.names).to_have_text(["in one"])
    expect(one.asked).to_have_text(["in one", "wait"])


def test_a_full_store_is_said(person):
    one = person()
    one.page.evaluate("localStorage.setItem('filler', 'x'.repeat(5 * 2 ** 20 - 100))")
    one.ask("hello")
    expect(one.page.get_by_role("alert")).to_contain_text(
        "This browser has no room left for this conversation"
    )
    expect(one.body).to_have_text("Answer to hello 🦙.")
    one.page.evaluate("localStorage.removeItem('filler')")
    one.ask("more")
    expect(one.page.locator("#full")).to_be_hidden()


def test_by_keyboard_alone(person, fake):
    one = person()
    keys = one.page.keyboard
    field = one.page.get_by_role("textbox", name="Message", exact=True)
    expect(field).to_be_focused()
    keys.type("two")
    keys.press("Shift+Enter")
    keys.type("lines")
    keys.press("Enter")
    expect(one.answers.last).to_have_attribute("aria-busy", "false")
    assert fake.seen[0]["messages"][0]["content"] == "two\nlines"
    expect(field).to_be_focused()
    keys.press("ArrowUp")
    keys.press("Control+a")
    keys.type("wait")
    keys.press("Enter")
    expect(one.answers.last).to_contain_text("The lighthouse keeper")
    expect(field).to_be_focused()
    keys.press("Escape")
    expect(one.answers.last).to_contain_text("Stopped")
    keys.press("Control+k")
    expect(one.answers).to_have_count(0)
    # Every button can be reached, and says what it is.
    names = set()
    name = "document.activeElement.ariaLabel || document.activeElement.textContent || ''"
    for _ in range(40):
        keys.press("Tab")
        names.add(one.page.evaluate(f"({name}).trim()"))
    assert {"Hide the conversations", "Rename", "Export as JSON", "Delete"} <= names
    assert {"Settings", "Model", "Message"} <= names


def test_scrolling_follows_until_one_goes_up(person, fake):
    one = person()
    one.ask("lines")
    place = "(scroll) => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight"
    scroll = one.page.locator("#scroll")
    assert scroll.evaluate(place) < 5
    one.wait()
    scroll.evaluate("(scroll) => scroll.scrollTo(0, 500)")
    expect(one.button("Go to the newest")).to_be_visible()
    fake.hold.set()
    expect(one.answers.last).to_contain_text("18 tokens")
    assert scroll.evaluate("(scroll) => scroll.scrollTop") == 500
    one.button("Go to the newest").click()
    assert scroll.evaluate(place) < 5
    expect(one.button("Go to the newest")).to_be_hidden()


LOOK = """() => {
  const clipped = (each) => each.closest('pre, .table, nav, #list, h1');
  const outside = [...document.querySelectorAll('main *')].filter((each) => !clipped(each) && each.checkVisibility()
    && each.getBoundingClientRect().right > innerWidth + 0.5).map((each) => each.outerHTML.slice(0, 80));
  const scroll = document.getElementById('scroll');
  const wide = Math.max(document.documentElement.scrollWidth - innerWidth, scroll.scrollWidth - scroll.clientWidth);
  return {outside, wide};
}"""  # noqa: E501


def ground_of(page):
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return luminance(rgba(color)[:3])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_whole_and_readable(person, size, scheme, tmp_path):
    one = person(size, color_scheme=scheme)
    one.ask("rich")
    one.ask("bad")
    one.ask("x" * 300)
    if size == "phone":
        expect(one.page.get_by_role("complementary")).to_be_hidden()
        one.button("Show the conversations").tap()
        expect(one.names).to_be_visible()
        one.page.screenshot(path=tmp_path / f"{size}_{scheme}_side.png")
        one.names.first.tap()
        expect(one.page.get_by_role("complementary")).to_be_hidden()
    one.page.screenshot(path=tmp_path / f"{size}_{scheme}.png")
    seen = one.page.evaluate(LOOK)
    assert seen["wide"] <= 0
    assert seen["outside"] == []
    assert faint(one.page.evaluate(TEXTS), np.ones(3)) == {}
    assert (ground_of(one.page) > 0.5) == (scheme == "light")


def test_the_switch_of_colors_is_kept(person):
    one = person(color_scheme="light")
    light = ground_of(one.page)
    for label in ("Colors: as the system", "Colors: light"):
        one.button(label).click()
    dark = ground_of(one.page)
    assert dark < 0.1 < light
    one.page.reload()
    # The page is drawn when its storage is open, which may be after it is loaded.
    wait_for(lambda: ground_of(one.page) == dark)


@pytest.fixture(scope="module")
def real():
    """The server itself, with a model that says anything, and the key "s3cret"."""
    with started(slots=2) as engine, listening(engine, ["s3cret"]) as (url, _):
        yield url


def test_with_the_server_itself(person, real):
    one = person(url=real)
    dialog = one.page.get_by_role("dialog")
    dialog.get_by_label("Key").fill("s3cret")
    dialog.get_by_label("Key").press("Enter")
    expect(one.page.get_by_label("Model")).to_have_value("small")
    sampling = {"Temperature": 0.9, "Top p": 0.95, "Top k": 40, "Min p": 0.001}
    limits = {"Max tokens": 30, "Seed": 7}
    penalties = {"Repetition": 1.1, "Presence": -0.5, "Frequency": 0.2}
    one.set(sampling | limits | penalties, system="Be brief.")
    one.ask("What is your name?")
    num_tokens = re.compile(r"\d+ tokens")
    expect(one.answers.last).to_contain_text(num_tokens)
    text = one.body.inner_text()
    assert text
    one.answers.last.get_by_role("button", name="Answer again").click()
    expect(one.page.locator("#toast")).to_contain_text("The answer was replaced.")
    expect(one.answers.last).to_contain_text(num_tokens)
    assert one.body.inner_text() == text  # with a seed, the same
    one.set({"Max tokens": 5000})
    one.ask("And then?")
    expect(one.answers.last).to_contain_text("exceed the context of 1024")
    one.set({"Max tokens": 400, "Temperature": 0})
    one.button("Try again").click()
    one.page.keyboard.press("Escape")
    expect(one.answers.last).to_contain_text(re.compile(r"Stopped|\d+ tokens"))
