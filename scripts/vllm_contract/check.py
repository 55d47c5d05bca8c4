"""Compares what a release has with what was reviewed: same, changed, gone or new, and whether our code still fits."""

import enum
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from scripts.vllm_contract.consumers import sites
from scripts.vllm_contract.entries import ENTRIES, ROOMS, WATCHED
from scripts.vllm_contract.releases import Release
from scripts.vllm_contract.reliance import How, Reliance
from scripts.vllm_contract.sources import digest, sources_below

REVIEWED = Path(__file__).parent / "reviewed"
#: The room of the places where vLLM asks for a class that ours derive from.
CONSUMERS = "vLLM's questions of class"


class State(enum.Enum):
    """Of an item against the release before it."""

    SAME = "same"
    CHANGED = "changed"
    GONE = "gone"
    NEW = "new"


@dataclass(frozen=True)
class Finding:
    """An item of the contract in a release.

    item: `module:Class.member`, or a question as in `consumers`.
    why: what of ours stands on it.
    note: what a person who looked at the difference found; "" is not reviewed.
    broken: why our code would not work with it, or None.
    """

    room: str
    item: str
    state: State
    why: str
    note: str
    broken: str | None = None

    @property
    def is_open(self) -> bool:
        """Somebody has to look at it."""
        return self.broken is not None or (self.state is not State.SAME and not self.note)


@dataclass
class Record:
    """What a release has, and what was said of its differences; a file of `reviewed/`.

    base: the release that it is compared with; None is the first.
    items: digests of the sources of every item.
    questions: see `consumers.sites`.
    notes: on items and questions that differ from those of `base`.
    """

    version: str
    base: str | None
    items: dict[str, str]
    questions: dict[str, int]
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, version: str) -> "Record":
        """Of a reviewed release."""
        return cls(**json.loads(_path(version).read_text()))

    def save(self) -> Path:
        """Write it for review."""
        path = _path(self.version)
        path.write_text(json.dumps(vars(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        return path


def reviewed_versions() -> list[str]:
    """Releases that have a record, oldest first."""
    return sorted((path.stem for path in REVIEWED.glob("*.json")), key=_number)


def base_of(version: str) -> str | None:
    """The newest reviewed release before a version."""
    return next((each for each in reversed(reviewed_versions()) if _number(each) < _number(version)), None)


def observe(release: Release) -> Record:
    """What a release has, without notes but those that were made on the same sources before."""
    sources = sources_below(release.root)
    items: dict[str, str] = {}
    for entry in _entries(release):
        for item, found in entry.items(sources).items():
            if found is not None:
                definition, statements = found
                items.setdefault(item, "there" if entry.how is How.NAME else digest(definition.module, statements))
    record = Record(release.version, base_of(release.version), items, sites(sources, WATCHED))
    if release.version in reviewed_versions():
        old = Record.load(release.version)
        kept = {name for name in old.notes if old.items.get(name) == items.get(name)}
        record.notes = {name: old.notes[name] for name in sorted(kept)}
    return record


def compare(release: Release, record: Record | None = None) -> list[Finding]:
    """Every item of the contract, and every question, in a release against the reviewed one before it.

    record: what was observed of it already.
    """
    record = record or observe(release)
    if record.base is None and release.version not in reviewed_versions():
        raise ValueError(f"vLLM {release.version} is older than every release that was reviewed.")
    # The first one has nothing before it, and was looked at as it is.
    base = Record.load(record.base) if record.base else Record.load(release.version)
    return [*_items(release, base, record), *_questions(base, record)]


def differences(version: str) -> Counter[State]:
    """How many items and questions of a reviewed release are the same as in the one before, changed, gone or new."""
    record = Record.load(version)
    base = Record.load(record.base) if record.base else record
    items = record.items.keys() | {item for item in base.items if _is_unbounded(item)}
    found = Counter(_state(base.items.get(item), record.items.get(item)) for item in items)
    return found + Counter(each.state for each in _questions(base, record))


def _is_unbounded(item: str) -> bool:
    owner = _entry_of(item)
    return owner is not None and not owner.until


def _items(release: Release, base: Record, record: Record) -> list[Finding]:
    sources, found = sources_below(release.root), []
    seen: set[str] = set()
    rooms = {entry.where: room for room, entries in ROOMS.items() for entry in entries}
    for entry in _entries(release):
        broken = entry.broken(sources)
        for item in entry.items(sources):
            if item not in seen:
                seen.add(item)
                state = _state(base.items.get(item), record.items.get(item))
                found.append(Finding(rooms[entry.where], item, state, entry.why, record.notes.get(item, ""), broken))
                broken = None
    # Members that a class had, and statements that are only for older releases.
    for item in sorted(base.items.keys() - seen):
        owner = _entry_of(item)
        if owner is not None and not owner.until:
            found.append(Finding(rooms[owner.where], item, State.GONE, owner.why, record.notes.get(item, "")))
    return found


def _questions(base: Record, record: Record) -> list[Finding]:
    before, now = _wherever(base.questions), _wherever(record.questions)
    found = []
    for question, count in record.questions.items():
        asked = _without_path(question)
        # A function that moved to another file asks what it asked before.
        is_new = count > base.questions.get(question, 0) and now[asked] > before[asked]
        state = State.NEW if is_new else State.SAME
        found.append(Finding(CONSUMERS, question, state, "our classes answer it too", record.notes.get(question, "")))
    return found


def _wherever(questions: dict[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for question, count in questions.items():
        found[_without_path(question)] += count
    return found


def _without_path(question: str) -> str:
    return question.split("::", 1)[1]


def _state(old: str | None, new: str | None) -> State:
    if old == new:
        # A statement for a release that has it nowhere is said to be broken, not changed.
        return State.SAME if new is not None else State.GONE
    if old is None:
        return State.NEW
    return State.GONE if new is None else State.CHANGED


def _entries(release: Release) -> list[Reliance]:
    return [entry for entry in ENTRIES if entry.is_for(release.minor)]


def _entry_of(item: str) -> Reliance | None:
    fitting = [entry for entry in ENTRIES if item == entry.where or item.startswith(entry.where + ".")]
    return max(fitting, key=lambda entry: len(entry.where), default=None)


def _path(version: str) -> Path:
    return REVIEWED / f"{version}.json"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
