"""The web page in a real browser, as people use it, with a server that answers as OpenAI's does."""

import asyncio
import contextlib
import json
import random
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import models
import pytest
import uvicorn
from playwright.sync_api import expect, sync_playwright
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.routing import Route

import jllama.serve
from jllama.serve.app import make_app
from jllama.serve.config import EngineConfig, HttpConfig
from jllama.serve.engine import EngineThread

pytestmark = pytest.mark.browser
PAGE = Path(jllama.serve.__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src "
    "'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SWITCHES = """--no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync"""
SIZES = {"phone": {"width": 390, "height": 844}, "desk": {"width": 1280, "height": 900}}
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
        self.key, self.loading, self.models, self.seen, self.left = (
            None,
            False,
            ["tiny", "pirate"],
            [],
            0,
        )
        self.hold = threading.Event()  # an answer to "wait" goes on when it is set

    def refuse(self, status, message, **headers):
        error = {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }
        }
        return JSONResponse(error, status, headers)

    def refusal(self, request):
        given = request.headers.get("Authorization")
        return (
            self.refuse(401, "Wrong key.") if self.key and given != f"Bearer {self.key}" else None
        )

    async def page(self, request):
        return HTMLResponse(PAGE.read_bytes(), headers={"Content-Security-Policy": POLICY})

    async def health(self, request):
        return (
            self.refuse(503, "Loading the weights.")
            if self.loading
            else JSONResponse({"status": "ok"})
        )

    async def list_models(self, request):
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "x"} for name in self.models
        ]
        return self.refusal(request) or JSONResponse({"object": "list", "data": data})

    async def chat(self, request):
        if refused := self.refusal(request):
            return refused
        body = await request.json()
        self.seen.append(body)
        asked = body["messages"][-1]["content"]
        if asked == "busy":
            return self.refuse(503, "the queue is full", **{"Retry-After": "7"})
        if asked == "bad":
            return self.refuse(400, "The prompt has 9000 tokens, and the context holds 2048.")
        return StreamingResponse(self.stream(body, asked), media_type="text/event-stream")

    async def stream(self, body, asked):
        texts = {"hostile": HOSTILE, "rich": RICH, "lines": "\n\n".join([WORDS] * 60)}
        text = texts.get(asked, f"Answer to {asked} 🦙.") if asked != "wait" else WORDS
        head = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": body["model"],
        }
        head["system_fingerprint"] = "fp_0123"

        def event(choices, **more):
            return (
                "data: "
                + json.dumps({**head, "choices": choices, **more}, ensure_ascii=False)
                + "\n\n"
            )

        def delta(finish=None, **fields):
            return event([{"index": 0, "delta": fields, "finish_reason": finish}])

        try:
            yield ": ping\n\n" + delta(role="assistant", content="")
            parts = re.findall(r"\s*\S+", text)
            for number, part in enumerate(parts):
                if number == 3 and asked == "wait":
                    while not self.hold.is_set():
                        await asyncio.sleep(0.02)
                if number == 3 and asked == "fail":
                    break
                raw = delta(content=part).encode()
                for cut in (raw[: len(raw) // 2], raw[len(raw) // 2 :]):  # also through a character
                    yield cut
                    await asyncio.sleep(0)
            if asked == "fail":
                problem = {"message": "The device was lost.", "type": "server_error"}
                yield f"data: {json.dumps({'error': problem})}\n\n"
                return
            yield delta("stop")
            usage = {
                "prompt_tokens": 12,
                "completion_tokens": len(parts),
                "total_tokens": 12 + len(parts),
            }
            usage["prompt_tokens_details"] = {"cached_tokens": 8}
            yield event([], usage=usage)
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise


@contextlib.contextmanager
def listening(app):
    """Its address while an application is served by a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def served():
    holder = {}
    routes = [
        ("/", "page"),
        ("/health", "health"),
        ("/v1/models", "list_models"),
        ("/v1/chat/completions", "chat"),
    ]

    def endpoint(name):
        async def call(request):
            return await getattr(holder["fake"], name)(request)

        return call

    app = Starlette(
        routes=[Route(path, endpoint(name), methods=["GET", "POST"]) for path, name in routes]
    )
    with listening(app) as url:
        yield url, holder


@pytest.fixture
def fake(served):
    served[1]["fake"] = made = Fake()
    yield made
    made.hold.set()


@pytest.fixture(scope="module")
def chromium():
    program = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert program, "there is no Chromium: apt-get install chromium"
    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=program, args=SWITCHES.split())
        yield started
        started.close()


class Person:
    """Someone at the page. ``problems`` is what the console said, ``elsewhere`` what was fetched
    from other servers."""

    def __init__(self, chromium, url, size="desk", **settings):
        self.url, self.problems, self.elsewhere = url, [], []
        self.context = chromium.new_context(
            viewport=SIZES[size], has_touch=size == "phone", **settings
        )
        self.context.on("request", self.note)
        self.page = self.tab()

    def note(self, request):
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def tab(self, at=""):
        page = self.context.new_page()
        page.set_default_timeout(300_000)
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.goto(self.url + at)
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

    @property
    def answers(self):
        return self.page.get_by_role("article", name="Answer")

    @property
    def asked(self):
        return self.page.get_by_role("article", name="You")

    @property
    def names(self):
        return self.page.locator("#list .name")


@pytest.fixture
def person(chromium, served, fake):
    """Opens the page, and looks in the end whether the browser had anything to complain about."""
    people = []

    def come(*args, url=served[0], **settings):
        people.append(Person(chromium, url, *args, **settings))
        return people[-1]

    yield come
    for one in people:
        one.context.close()
        # A browser notes every refusal of a server as an error of its own.
        assert [
            each for each in one.problems if not each.startswith("Failed to load resource")
        ] == []
        assert one.elsewhere == []


def wait_until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


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
    one.send("wait")
    expect(one.answers.last).to_contain_text("The lighthouse keeper")
    expect(one.answers.last).not_to_contain_text("counted")
    expect(one.page.get_by_role("button", name="Stop")).to_be_visible()
    one.page.wait_for_timeout(600)  # an answer that takes less has no speed to speak of
    fake.hold.set()
    expect(one.answers.last.locator(".body")).to_have_text(WORDS)
    expect(one.answers.last).to_contain_text("18 tokens")
    expect(one.answers.last).to_contain_text("tokens/s")
    details = one.answers.last.locator(".facts").get_attribute("title")
    (body,) = fake.seen
    for part in (
        "tiny",
        f"seed {body['seed']}",
        "prompt of 12 tokens, 8 from the cache",
        "fp_0123",
    ):
        assert part in details
    assert body.pop("seed") >= 0
    assert (body.pop("temperature"), body.pop("top_p")) == (0.7, 0.95)
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "wait"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    one.ask("and then?")
    assert [each["role"] for each in fake.seen[1]["messages"]] == ["user", "assistant", "user"]
    assert fake.seen[1]["messages"][1]["content"] == WORDS
    expect(one.answers.last.locator(".body")).to_have_text("Answer to and then? 🦙.")
    assert one.problems == []


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_keeps_what_came(person, fake, by):
    one = person()
    one.send("wait")
    expect(one.answers.last).to_contain_text("The lighthouse keeper")
    one.page.get_by_role(
        "button", name="Stop"
    ).click() if by == "button" else one.page.keyboard.press("Escape")
    expect(one.answers.last).to_contain_text("Stopped")
    expect(one.answers.last.locator(".body")).to_have_text("The lighthouse keeper")
    wait_until(lambda: fake.left == 1)
    one.ask("on")
    assert fake.seen[1]["messages"][1] == {"role": "assistant", "content": "The lighthouse keeper"}


def test_a_reload_keeps_everything_also_half_an_answer(person, fake):
    one = person()
    one.ask("first")
    one.send("wait")
    expect(one.answers.last).to_contain_text("The lighthouse keeper")
    one.page.reload()
    expect(one.answers).to_have_count(2)
    expect(one.answers.last.locator(".body")).to_have_text("The lighthouse keeper")
    expect(one.answers.last).to_contain_text("Broken off when the page was closed")
    expect(one.page.get_by_role("heading", name="first", exact=True)).to_be_visible()
    fake.hold.set()
    one.page.get_by_role("button", name="Answer again").last.click()
    expect(one.answers.last.locator(".body")).to_have_text(WORDS)


def test_edit_and_resend_replaces_the_rest_and_can_be_undone(person, fake):
    one = person()
    for text in ("one", "two", "three"):
        one.ask(text)
    one.asked.nth(1).get_by_role("button", name="Edit and send again").click()
    field = one.page.get_by_role("textbox", name="Edit the message")
    expect(field).to_be_focused()
    field.press("Escape")
    expect(one.asked.nth(1)).to_have_text("two")
    one.asked.nth(1).get_by_role("button", name="Edit and send again").click()
    field.fill("2")
    field.press("Enter")
    expect(one.answers.last.locator(".body")).to_have_text("Answer to 2 🦙.")
    expect(one.asked).to_have_text(["one", "2"])
    assert [each["content"] for each in fake.seen[-1]["messages"]] == [
        "one",
        "Answer to one 🦙.",
        "2",
    ]
    one.page.get_by_role("button", name="Undo").click()
    expect(one.asked).to_have_text(["one", "two", "three"])
    one.page.reload()
    expect(one.asked).to_have_text(["one", "two", "three"])


def test_regenerate_draws_another_seed_unless_one_is_set(person, fake):
    one = person()
    one.ask("one")
    for _ in range(2):
        one.answers.last.get_by_role("button", name="Answer again").click()
        expect(one.answers.last).to_have_attribute("aria-busy", "false")
    wait_until(lambda: len(fake.seen) == 3)
    assert len({each["seed"] for each in fake.seen}) == 3
    expect(one.answers).to_have_count(1)


def test_text_of_the_model_never_runs(person):
    one = person()
    one.ask("hostile")
    body = one.answers.last.locator(".body")
    written = body.inner_text()
    for part in (
        "<script>window.ran = 1</script><img",
        "<iframe",
        "&lt;entity",
        "[a](javascript:",
        "</code></pre>",
    ):
        assert part in written
    tags = body.evaluate(
        "(body) => [...new Set([...body.querySelectorAll('*')].map((each) => each.tagName))]"
    )
    known = (
        "P BR A CODE TABLE THEAD TBODY TR TH TD STRONG EM PRE DIV SPAN BUTTON BLOCKQUOTE H3 "
        "UL LI svg use"
    )
    assert set(tags) <= set(re.findall(r"\S+", known))
    links = body.evaluate(
        "(body) => [...body.querySelectorAll('a')].map((each) => [each.href, each.rel, "
        "each.target])"
    )
    assert [each[0] for each in links] == [
        "https://example.com/",
        "https://example.com/a_(b)?q=1#x",
        "https://example.com/spy.png",
        "https://example.com/",
    ]
    assert {tuple(each[1:]) for each in links} == {("noopener noreferrer", "_blank")}
    names = "(body) => [...body.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())"
    assert not [
        each for each in body.evaluate(names) if each.startswith("on") or each in ("src", "srcset")
    ]
    one.page.wait_for_timeout(200)
    assert one.page.evaluate("window.ran") is None
    one.page.reload()
    expect(one.answers.last).to_have_attribute("aria-busy", "false")
    assert one.page.evaluate("window.ran") is None
    assert one.problems == []
    # A name from the store is text, too.
    one.names.hover()
    one.page.get_by_role("button", name="Rename").click()
    one.page.keyboard.type("<img src=x onerror=window.ran=1>")
    one.page.keyboard.press("Enter")
    expect(one.names).to_have_text(["<img src=x onerror=window.ran=1>"])
    assert one.page.evaluate("window.ran") is None


def test_markdown_is_shown(person):
    one = person()
    one.ask("rich")
    body = one.answers.last.locator(".body")
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
    assert body.locator("a").evaluate_all("(all) => all.map((each) => each.href)") == [
        "https://example.com/",
        "https://example.com/page",
    ]


LONG = [
    "*a " * 30_000,
    "[" * 90_000,
    "`" * 300 + "x" * 1000 + " ``" * 20_000,
    "> " * 30_000,
    "- " * 30_000,
    "_a_b " * 20_000,
    "![[](" * 18_000,
    "|" * 50_000 + "\n" + "|-" * 25_000,
    "# " + " #" * 40_000,
    "https://" * 12_000,
    "**" * 45_000,
    "***a** b* " * 9_000,
    "```\n" * 20_000,
    "\n".join("  " * depth + "- x" for depth in range(400)),
]


def test_long_texts_of_marks_are_shown(person):
    one = person()
    show = (
        "(text) => { const node = make('div'); showMarkdown(node, text); return "
        "node.textContent.length; }"
    )
    for text in LONG:
        one.page.evaluate(show, text)


def test_a_text_that_grows_is_shown_as_if_it_came_at_once(person):
    one = person()
    draw = random.Random(0)
    marks = [
        "```",
        "~~~",
        "- ",
        "1. ",
        "2) ",
        "> ",
        "# ",
        "|",
        "|-",
        ":-:|",
        "**",
        "*",
        "_",
        "`",
        "~~",
        "[a](",
        "https://a.b/",
        ")",
        "\\",
    ]
    parts = [
        *marks,
        *marks,
        "word",
        "two words",
        " ",
        "  ",
        "    ",
        "<b>",
        "&amp;",
        "é🦙",
        "---",
        *["\n"] * 8,
        "\n\n",
        "\t",
        "\r\n",
    ]
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


@pytest.mark.parametrize(
    "is_secure", [True, False]
)  # a browser has no clipboard for pages of http elsewhere
def test_copy(person, is_secure):
    one = person(permissions=["clipboard-read", "clipboard-write"])
    if not is_secure:
        one.page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    one.ask("rich")
    field = one.page.get_by_role("textbox", name="Message", exact=True)
    code, whole = (
        one.answers.last.locator(each).last
        for each in (".code-head button", ".foot [aria-label=Copy]")
    )
    for button, text in ((code, 'def f(x):\n    return "<b>" + x  # **not bold**'), (whole, RICH)):
        said = one.page.locator("#said")
        said.evaluate(
            "(element) => (element.textContent = '')"
        )  # else the last click's word is read
        button.click()
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
    expect(one.answers.last.locator(".body")).to_have_text("Answer to again 🦙.")
    one.page.get_by_role("button", name="Settings").click()
    one.page.get_by_role("button", name="Forget the API key").click()
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
    one.page.get_by_role("listitem").filter(has_text="about goats").get_by_role(
        "button", name="Rename"
    ).click()
    one.page.keyboard.type("Goats")
    one.page.keyboard.press("Enter")
    expect(one.names).to_have_text(["about ships", "Goats"])
    one.page.get_by_role("listitem").filter(has_text="Goats").get_by_role(
        "button", name="Delete"
    ).click()
    expect(one.names).to_have_text(["about ships"])
    expect(one.answers).to_have_count(0)
    one.page.get_by_role("button", name="Undo").click()
    expect(one.names).to_have_text(["about ships", "Goats"])
    expect(one.asked).to_have_text(["about goats"])
    one.page.reload()
    expect(one.names).to_have_text(["about ships", "Goats"])
    expect(one.asked).to_have_text(["about goats"])


def test_an_answer_goes_on_while_another_conversation_is_read(person, fake):
    one = person()
    one.send("wait")
    expect(one.answers.last).to_contain_text("The lighthouse keeper")
    one.page.keyboard.press("Control+k")
    one.ask("other")
    fake.hold.set()
    one.names.filter(has_text="wait").click()
    expect(one.answers.last.locator(".body")).to_have_text(WORDS)


def test_export_and_import(person, tmp_path):
    one = person()
    one.ask("hello")
    with one.page.expect_download() as download:
        one.page.get_by_role("button", name="Export", exact=True).click()
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
    one.page.get_by_role("button", name="Settings").click()
    given = {
        "Temperature": ("temperature", 0.5), "Top p": ("top_p", 0.9), "Top k": ("top_k", 40),
        "Min p": ("min_p", 0.05), "Max tokens": ("max_tokens", 64), "Seed": ("seed", 7),
        "Repetition": ("repetition_penalty", 1.1),
        "Presence": ("presence_penalty", -0.5), "Frequency": ("frequency_penalty", 0.2),
    }  # fmt: skip
    one.page.get_by_label("System prompt").fill("Be brief.")
    for label, (_, value) in given.items():
        one.page.get_by_role("spinbutton", name=label).fill(str(value))
    one.page.keyboard.press("Escape")
    one.page.get_by_label("Model").select_option("pirate")
    one.ask("hello")
    one.page.reload()
    one.page.get_by_role("button", name="New conversation").click()
    one.ask("again")
    for body in fake.seen:
        assert {name: body[name] for name, _ in given.values()} == dict(given.values())
        assert body["model"] == "pirate"
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    one.page.get_by_role("button", name="Settings").click()
    one.page.get_by_role("button", name="Reset to defaults").click()
    one.page.get_by_role("button", name="Close").click()
    one.ask("plain")
    plain = {"model", "messages", "seed", "temperature", "top_p", "stream", "stream_options"}
    assert set(fake.seen[-1]) == plain
    assert (fake.seen[-1]["temperature"], fake.seen[-1]["top_p"]) == (0.7, 0.95)


def test_refusals_and_failures_are_said_and_can_be_tried_again(person, fake):
    one = person()
    one.send("busy")
    expect(one.answers.last).to_contain_text("The queue is full. Try again in 7 s.")
    one.page.get_by_role("button", name="Try again").click()
    wait_until(lambda: len(fake.seen) == 2)
    one.ask("hello")  # what got no answer goes along: roles take turns
    assert fake.seen[-1]["messages"] == [{"role": "user", "content": "busy\n\nhello"}]
    one.ask("bad")
    expect(one.answers.last).to_contain_text(
        "The prompt has 9000 tokens, and the context holds 2048."
    )
    one.page.keyboard.press("Control+k")
    one.ask("fail")
    expect(one.answers.last).to_contain_text("The device was lost.")
    expect(one.answers.last.locator(".body")).to_have_text("Answer to fail")
    one.page.context.set_offline(True)
    one.ask("away")
    expect(one.answers.last).to_contain_text("The server cannot be reached.")
    expect(one.page.locator("#state")).to_contain_text("The server cannot be reached.")
    one.page.context.set_offline(False)
    expect(one.page.locator("#state")).to_be_hidden()
    one.page.get_by_role("button", name="Try again").last.click()
    expect(one.answers.last.locator(".body")).to_have_text("Answer to away 🦙.")


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
    expect(other.get_by_role("article", name="Answer").last).to_contain_text(
        "The lighthouse keeper"
    )
    one.send("me too", other)
    expect(other.locator("#toast")).to_contain_text("is being answered in another tab")
    fake.hold.set()
    expect(other.get_by_role("article", name="Answer").last).to_contain_text(WORDS)
    expect(other.get_by_role("article", name="Answer").last).to_contain_text("18 tokens")
    other.get_by_role("listitem").filter(has_text="in other").get_by_role(
        "button", name="Delete"
    ).click()
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
    expect(one.answers.last.locator(".body")).to_have_text("Answer to hello 🦙.")
    one.page.evaluate("localStorage.removeItem('filler')")
    one.ask("more")
    expect(one.page.locator("#full")).to_be_hidden()


def test_by_keyboard_alone(person, fake):
    one = person()
    keys = one.page.keyboard
    expect(one.page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
    keys.type("two")
    keys.press("Shift+Enter")
    keys.type("lines")
    keys.press("Enter")
    expect(one.answers.last).to_have_attribute("aria-busy", "false")
    assert fake.seen[0]["messages"][0]["content"] == "two\nlines"
    expect(one.page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
    keys.press("ArrowUp")
    keys.press("Control+a")
    keys.type("wait")
    keys.press("Enter")
    expect(one.answers.last).to_contain_text("The lighthouse keeper")
    expect(one.page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
    keys.press("Escape")
    expect(one.answers.last).to_contain_text("Stopped")
    keys.press("Control+k")
    expect(one.answers).to_have_count(0)
    # Every button can be reached, and says what it is.
    names = set()
    for _ in range(40):
        keys.press("Tab")
        names.add(
            one.page.evaluate(
                "(document.activeElement.ariaLabel || document.activeElement.textContent || "
                "'').trim()"
            )
        )
    assert {
        "Hide the conversations",
        "Rename",
        "Export as JSON",
        "Delete",
        "Settings",
        "Model",
        "Message",
    } <= names


def test_scrolling_follows_until_one_goes_up(person, fake):
    one = person()
    one.ask("lines")
    place = "(scroll) => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight"
    scroll = one.page.locator("#scroll")
    assert scroll.evaluate(place) < 5
    one.send("wait")
    expect(one.answers.last).to_contain_text("The lighthouse keeper")
    scroll.evaluate("(scroll) => scroll.scrollTo(0, 500)")
    expect(one.page.get_by_role("button", name="Go to the newest")).to_be_visible()
    fake.hold.set()
    expect(one.answers.last).to_contain_text("18 tokens")
    assert scroll.evaluate("(scroll) => scroll.scrollTop") == 500
    one.page.get_by_role("button", name="Go to the newest").click()
    assert scroll.evaluate(place) < 5
    expect(one.page.get_by_role("button", name="Go to the newest")).to_be_hidden()


LOOK = """() => {
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const own = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !own.checkVisibility() || own.closest('script, .sr')) continue;
    const behind = [];
    for (let each = own; each; each = each.parentElement) behind.push(getComputedStyle(each).backgroundColor);
    texts.push([walker.currentNode.textContent.trim(), getComputedStyle(own).color, behind]);
  }
  const clipped = (each) => each.closest('pre, .table, nav, #list, h1');
  const outside = [...document.querySelectorAll('main *')].filter((each) => !clipped(each) && each.checkVisibility()
    && each.getBoundingClientRect().right > innerWidth + 0.5).map((each) => each.outerHTML.slice(0, 80));
  const scroll = document.getElementById('scroll');
  const wide = Math.max(document.documentElement.scrollWidth - innerWidth, scroll.scrollWidth - scroll.clientWidth);
  return {texts, outside, wide};
}"""  # noqa: E501


def channels(text):
    """``rgb(1, 2, 3)`` as shares of one, and its alpha."""
    numbers = [float(each) for each in re.findall(r"[\d.]+", text)]
    return [each / 255 for each in numbers[:3]], numbers[3] if len(numbers) > 3 else 1.0


def luminance(color):
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in color
    ]
    return sum(share * each for share, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_whole_and_readable(person, size, scheme, tmp_path):
    one = person(size, color_scheme=scheme)
    one.ask("rich")
    one.ask("bad")
    one.ask("x" * 300)
    if size == "phone":
        expect(one.page.get_by_role("complementary")).to_be_hidden()
        one.page.get_by_role("button", name="Show the conversations").tap()
        expect(one.names).to_be_visible()
        one.page.screenshot(path=tmp_path / f"{size}_{scheme}_side.png")
        one.names.first.tap()
        expect(one.page.get_by_role("complementary")).to_be_hidden()
    one.page.screenshot(path=tmp_path / f"{size}_{scheme}.png")
    seen = one.page.evaluate(LOOK)
    assert seen["wide"] <= 0
    assert seen["outside"] == []
    faint = {}
    for text, color, behind in seen["texts"]:
        base = [1.0, 1.0, 1.0]
        for layer in map(channels, reversed(behind)):
            base = [
                layer[1] * new + (1 - layer[1]) * old
                for new, old in zip(layer[0], base, strict=True)
            ]
        dark, light = sorted((luminance(channels(color)[0]), luminance(base)))
        if (light + 0.05) / (dark + 0.05) < 4.5:  # WCAG 2.2, 1.4.3
            faint[text] = (light + 0.05) / (dark + 0.05)
    assert faint == {}
    ground = channels(one.page.evaluate("getComputedStyle(document.body).backgroundColor"))[0]
    assert (luminance(ground) > 0.5) == (scheme == "light")


def test_the_switch_of_colors_is_kept(person):
    one = person(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = one.page.evaluate(ground)
    for label in ("Colors: as the system", "Colors: light"):
        one.page.get_by_role("button", name=label).click()
    dark = one.page.evaluate(ground)
    assert luminance(channels(dark)[0]) < 0.1 < luminance(channels(light)[0])
    one.page.reload()
    assert one.page.evaluate(ground) == dark


@pytest.fixture(scope="module")
def real():
    """The server itself, with a model that says anything, and the key "s3cret"."""
    engine = EngineThread({"tiny": models.served()}, EngineConfig(slots=2))
    engine.start()
    with listening(make_app(engine, HttpConfig(), ["s3cret"])) as url:
        yield url
    engine.close()


def test_with_the_server_itself(person, real):
    one = person(url=real)
    dialog = one.page.get_by_role("dialog")
    dialog.get_by_label("Key").fill("s3cret")
    dialog.get_by_label("Key").press("Enter")
    expect(one.page.get_by_label("Model")).to_have_value("tiny")
    one.page.get_by_role("button", name="Settings").click()
    given = {
        "Temperature": 0.9,
        "Top p": 0.95,
        "Top k": 40,
        "Min p": 0.001,
        "Max tokens": 30,
        "Seed": 7,
    }
    penalties = {"Repetition": 1.1, "Presence": -0.5, "Frequency": 0.2}
    for label, value in {**given, **penalties}.items():
        one.page.get_by_role("spinbutton", name=label).fill(str(value))
    one.page.get_by_label("System prompt").fill("Be brief.")
    one.page.keyboard.press("Escape")
    one.ask("What is your name?")
    expect(one.answers.last).to_contain_text(re.compile(r"\d+ tokens"))
    body = one.answers.last.locator(".body")
    said = body.inner_text()
    assert said
    one.answers.last.get_by_role("button", name="Answer again").click()
    expect(one.page.locator("#toast")).to_contain_text("The answer was replaced.")
    expect(one.answers.last).to_contain_text(re.compile(r"\d+ tokens"))
    assert body.inner_text() == said  # with a seed, the same
    one.page.get_by_role("button", name="Settings").click()
    one.page.get_by_role("spinbutton", name="Max tokens").fill("5000")
    one.page.keyboard.press("Escape")
    one.ask("And then?")
    expect(one.answers.last).to_contain_text("exceed the context of 1024")
    one.page.get_by_role("button", name="Settings").click()
    one.page.get_by_role("spinbutton", name="Max tokens").fill("400")
    one.page.get_by_role("spinbutton", name="Temperature").fill("0")
    one.page.keyboard.press("Escape")
    one.page.get_by_role("button", name="Try again").click()
    one.page.keyboard.press("Escape")
    expect(one.answers.last).to_contain_text(re.compile(r"Stopped|\d+ tokens"))
