"""The one driver that changes good messages and gives them to whatever reads them.

A parser of bytes from outside returns a value or raises one of the errors that it documents, and nothing
else, within bounded memory and processor time. The table of parsers is in `test_fuzz_mutations.py`. Input
`number` of a parser is the same in every run, so that a failure can be repeated; `MUTATIONS` (`make mutate`)
says how many there are over all parsers.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Far above what an honest input takes, and far below what a parser takes that believes a length, or that
# looks at every byte once for each other byte.
CPU_SECONDS_MAX = 3.0
MEMORY_BYTES_MAX = 256 << 20
REASON_MAX = 5000
GROWTH_MAX = 64 << 10
TOKENS_IN = 4096  # bytes
LOOK_EVERY = 100  # inputs between two looks at the memory

_EDGES = (0, 1, 127, 128, 255, *(2**n - 1 for n in (16, 31, 32, 63, 64)), *(2**n for n in (15, 31, 62, 63)))
_TEXTS = (b"[" * 3000, b'{"a":' * 1500, b"9" * 5000, *rb'null -1 1e999 NaN "" ..'.split(), b"\xff\xfe", b"\0")
_TOKEN = re.compile(rb'-?[0-9.]+|"[^"]*"|true|false|null|[A-Za-z-]+')
_VALUES = b'null true -1 0.5 1e999 "" "x" [] {} [null] {"a":0} [[1]]'.split()


@dataclass(frozen=True)
class Parser:
    """Something that reads bytes from outside.

    Attributes:
        samples: good messages, or what makes them.
        parse: a function that reads one, or the file of this name in a folder, if there is a `file`.
        refusals: the errors with which it may refuse one; without any it takes everything.
        foreign: inputs that it must refuse.
        found: other inputs with which it once did something else.
        cost: how many other parsers read one in the time that it takes; it is given so much fewer of them.
    """

    name: str
    samples: Sequence[bytes] | Callable[[], Sequence[bytes]]
    parse: Callable[[bytes], object] | Callable[[Path], object]
    refusals: tuple[type[Exception], ...] = ()
    foreign: Sequence[bytes] = ()
    found: Sequence[bytes] = ()
    file: str = ""
    cost: int = 1


@dataclass
class Tally:
    """What a parser has made of many inputs."""

    ends: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    memory_bytes: int = 0

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        return f"{ends}; {self.slowest_s * 1000:.0f} ms and {self.memory_bytes >> 20} MiB at the most"


def assert_all_are_taken_or_refused(parser: Parser, count: int, folder: Path) -> Tally:
    """Give a parser its samples, all that it must refuse or was found once, and `count` changed samples, or
    fewer if they cost more.

    Raises:
        AssertionError: it refuses a sample, takes what is foreign, or raises what it must not, or an input
          takes too much; the text has the input's number.
    """
    tally, count = Tally(), count // parser.cost
    known = [*parser.found, *parser.foreign]
    read = _reader(parser, folder)
    samples = parser.samples() if callable(parser.samples) else parser.samples
    for sample in samples:
        read(sample)  # so the changed ones are near to what is taken
    forget_peak()
    before = peak_bytes()
    for number in range(-len(known), count):
        data = known[number] if number < 0 else changed(samples, number)
        is_taken = _try(parser, read, data, number, tally)
        is_foreign = -len(parser.foreign) <= number < 0
        assert not (is_taken and is_foreign), f"{parser.name} takes input {number}: {data[:300]!r}"
        if number < 0 or number % LOOK_EVERY == 0 or number == count - 1:
            tally.memory_bytes = peak_bytes() - before
            assert tally.memory_bytes < MEMORY_BYTES_MAX, (
                f"{parser.name}: one of the {LOOK_EVERY} inputs up to {number} takes {tally}"
            )
    return tally


def _reader(parser: Parser, folder: Path) -> Callable[[bytes], object]:
    parse: Callable[..., object] = parser.parse
    if not parser.file:
        return parse
    path = folder / parser.file

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return parse(path)

    return read


def _try(parser: Parser, read: Callable[[bytes], object], data: bytes, number: int, tally: Tally) -> bool:
    """Let the parser read an input; return whether it has taken it."""
    where = f"{parser.name}, input {number}: {data[:300]!r}, {len(data)} bytes"
    began = time.process_time()
    try:
        read(data)
    except parser.refusals as refusal:
        end, why = type(refusal).__name__, str(refusal)
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__} is no refusal of this parser") from error
    else:
        end, why = "taken", "-"
    took = time.process_time() - began
    tally.ends[end] += 1
    assert 0 < len(why) < REASON_MAX, f"{where}: a refusal says why, and does not repeat it all: {why!r:.200}"
    tally.slowest_s = max(tally.slowest_s, took)
    assert took < CPU_SECONDS_MAX, f"{where}: {took:.1f} s"
    return end == "taken"


def changed(samples: Sequence[bytes], number: int) -> bytes:
    """Return a sample with one to four changes; `number` says which."""
    dice = random.Random(number)
    found = bytearray(dice.choice(samples))
    for _ in range(dice.randint(1, 4)):
        dice.choice(_CHANGES)(found, dice, samples)
    return bytes(found)


def _flip(found: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    if found:
        found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)


def _cut(found: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    del found[dice.randrange(len(found) + 1) :]


def _remove(found: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    at = dice.randrange(len(found) + 1)
    del found[at : at + dice.randint(1, 8)]


def _insert(found: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    at = dice.randrange(len(found) + 1)
    found[at:at] = dice.choice(_TEXTS) if dice.random() < 0.1 else dice.randbytes(dice.randint(1, 8))


def _number(found: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    """Put a number where a length may be."""
    width, at = dice.choice((1, 2, 4, 8)), dice.randrange(len(found) + 1)
    value = dice.choice(_EDGES) if dice.random() < 0.7 else dice.randrange(len(found) + 9)
    found[at : at + width] = (value % 256**width).to_bytes(width, dice.choice(("little", "big")))


def _repeat(found: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    at = dice.randrange(len(found) + 1)
    part = found[at : at + dice.choice((1, 4, 16, 64))]
    times = dice.choice((1, 2, 30, 1000))
    found[at:at] = (part * times)[:GROWTH_MAX]


def _splice(found: bytearray, dice: random.Random, samples: Sequence[bytes]) -> None:
    other = dice.choice(samples)
    found[dice.randrange(len(found) + 1) :] = other[dice.randrange(len(other) + 1) :]


def _token(found: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    """Put another value in the place of one of a text."""
    if tokens := list(_TOKEN.finditer(found[:TOKENS_IN])):
        found[slice(*dice.choice(tokens).span())] = dice.choice(_VALUES)


_CHANGES = (_token, _flip, _flip, _cut, _remove, _insert, _number, _number, _repeat, _splice)


def forget_peak() -> None:
    """Let the kernel count this process's greatest resident memory from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return this process's greatest resident memory, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024
