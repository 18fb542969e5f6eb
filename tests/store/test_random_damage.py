"""Random damage of any file of a run directory: `check` reports it in one line, starts and readers
refuse or continue, and no command prints a traceback."""

import asyncio
import functools
import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scripted_rows

from batch_runner import Silent, run_batch
from hermes_rl.cli import command, faults_of, run_guarded
from hermes_rl.errors import ExitCode, HermesError, StoreError
from hermes_rl.store import (
    JournalWriter,
    OpenOptions,
    RunDir,
    compact_run,
    load_run,
    open_run,
    repair_run,
)

HOW = ("flip", "flip", "flip", "half", "empty", "gone", "folder")
OPTIONS = OpenOptions(grace_s=0.01)


def check(path: Path) -> int:
    """`hermes-rl check RUN`."""
    flags = {"run": False, "repair": False, "tokens": False, "masks": False, "as_json": False}
    return run_guarded(
        lambda: command(str(path), columns=None, limit=None, tokenizer=None, **flags), "check"
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that ended after two starts, and a copy of it that was killed in a third."""
    folder = tmp_path_factory.mktemp("runs")
    dataset, ended, killed = folder / "tasks.jsonl", folder / "ended", folder / "killed"
    rows = [json.dumps({"id": f"t{n}", "prompt": f"Say {n}"}) for n in range(4)]
    for some in (2, 4):
        dataset.write_text("\n".join(rows[:some]) + "\n")
        config = {
            "dataset": {"path": str(dataset)},
            "model": {"name": "noop"},
            "sandbox": {"backend": "none"},
            "run": {"out": str(ended), "workers": 0, "allow_unsandboxed": True},
        }
        run_batch(config, progress=Silent())

    async def cut() -> None:
        identity = RunDir(ended).epoch(1).identity
        shutil.copytree(ended, folder / "cut")
        async with (
            await open_run(folder / "cut", identity) as driver,
            JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
        ):
            for number in range(5):
                await scripted_rows.run_attempt(driver, journal, number)
            driver.dispatch(scripted_rows.make_item(9, 0, driver.epoch), journal.writer)
            shutil.copytree(folder / "cut", killed)

    asyncio.run(cut())
    return {"ended": ended, "killed": killed}


def files(run: Path) -> list[Path]:
    found = [p.relative_to(run) for p in sorted(run.rglob("*")) if p.is_file()]
    return [p for p in found if p.name not in ("LOCK", "alive", "report.html", "started")]


def damage(path: Path, how: str, chance: random.Random) -> None:
    content = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "half":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flip":
        at = chance.randrange(len(content))
        path.write_bytes(
            content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
        )


def must_be_reported(name: Path, how: str, before: bytes, now: Path) -> bool:
    """Whether `check` must report the damage; other damage only must not cause a traceback."""
    kind = name.parts[0]
    if kind == "journal":
        if how == "flip":  # a last line without its newline is what a kill leaves
            return now.read_bytes().endswith(b"\n")
        return how == "folder"
    if how != "flip":
        return name.name != "run.yaml" or how != "half"
    if kind in ("epochs", "commits"):  # a flip in the digest's own name changes no data
        return b',"sha256":"' in now.read_bytes()[-80:]
    return name.suffix == ".parquet"


@pytest.fixture
def place(run_path: Path) -> Path:
    run_path.parent.mkdir(exist_ok=True)
    return run_path


@pytest.mark.parametrize("seed", range(4))
def test_every_damage_is_reported_in_one_line(
    runs: dict[str, Path], place: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(seed)
    for number in range(40):
        original = runs[chance.choice(["ended", "killed"])]
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(original, place)
        name, how = chance.choice(files(place)), chance.choice(HOW)
        damage(place / name, how, chance)
        case = f"{original.name} {name} {how} (seed {seed}, number {number})"

        found = check(place)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err, case
        if must_be_reported(name, how, (original / name).read_bytes(), place / name):
            lines = [line for line in printed.err.splitlines() if str(place / name) in line]
            if name.parts[0] == "commits" and how == "gone":  # its parts are foreign now
                lines = [line for line in printed.err.splitlines() if "to no commit" in line][:1]
            assert found == ExitCode.BAD_INPUT, case
            assert len(lines) == 1, (case, printed.err)
        refused = [use(functools.partial(read, place))]
        if number % 3 == 0:
            identity = RunDir(original).epoch(1).identity
            refused.append(use(functools.partial(start, place, identity)))
        for line in filter(None, refused):
            assert str(place) in line, case
            assert "\n" not in line, case


def read(path: Path) -> None:
    assert load_run(path).trajectories is not None


def start(path: Path, identity: dict[str, object]) -> None:
    asyncio.run(open_and_leave(path, identity))


def use(work: Callable[[], object]) -> str | None:
    """Why a reader or a start refuses a run; None when it continues."""
    try:
        work()
    except HermesError as error:
        return str(error)
    return None


async def open_and_leave(path: Path, identity: dict[str, object]) -> None:
    async with await open_run(path, identity, None, OPTIONS):
        pass


@pytest.mark.parametrize("seed", range(2))
def test_repair_restores_every_row_that_exists(
    runs: dict[str, Path], place: Path, seed: int
) -> None:
    """A flipped bit in any file of a finished run, then `--repair`, then a start."""
    chance = random.Random(seed)
    for number in range(40):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(runs["ended"], place)
        if number % 2:
            compact_run(place, grace_s=0)
        name, identity = chance.choice(files(place)), RunDir(runs["ended"]).epoch(1).identity
        if number % 5 == 0:
            name = chance.choice([f for f in files(place) if f.parts[0] in ("epochs", "commits")])
        damage(place / name, chance.choice(["flip", "flip", "gone"]), chance)
        case = f"{name} (seed {seed}, number {number})"
        wanted = {u for part in place.glob("trajectories/*") for u in readable_units(part)}

        repair_run(place, grace_s=0.01)
        run = load_run(place)
        assert set(run.trajectories["unit_id"]) == wanted, case
        start(place, identity)
        left = [line for line in faults_of(place) if "stats.json" not in line]
        if name.parts[0] in ("epochs", "commits", "compacted"):
            assert (left, run.ledger.done) == ([], 4), case
        elif name.parts[0] == "trajectories":
            assert run.ledger.done == len(wanted), case
        if name.suffix == ".parquet" and not (place / name).exists():
            assert left == [], case


def readable_units(part: Path) -> list[str]:
    try:
        units: list[str] = pq.read_table(part)["unit_id"].to_pylist()
    except (OSError, pa.ArrowException):
        return []
    return units


def test_a_part_that_no_reader_accepts_is_saved_apart(
    runs: dict[str, Path], place: Path, damage_of_lengths: bytes
) -> None:
    """A flipped bit made one column shorter: each column can be read, the table cannot."""
    shutil.copytree(runs["ended"], place)
    part = place / "trajectories" / "part-1-0-0.parquet"
    part.write_bytes(damage_of_lengths)
    with pytest.raises(StoreError, match=f"{part.name} cannot be read"):
        read(place)
    repair_run(place, grace_s=0.01)
    assert len(load_run(place).trajectories) == 2
    assert [line for line in faults_of(place) if "stats.json" not in line] == []
    (part,) = place.glob("trajectories/*.parquet")  # a flipped bit in the JSON of a column
    rows = pq.read_table(part)
    damaged = pa.array(["[{" for _ in range(rows.num_rows)], rows.schema.field("tools").type)
    index = rows.schema.get_field_index("tools")
    pq.write_table(rows.set_column(index, rows.schema.field(index), damaged), part)
    repair_run(place, grace_s=0.01)
    assert len(load_run(place).trajectories) == 0


@pytest.fixture
def damage_of_lengths(runs: dict[str, Path], tmp_path: Path) -> bytes:
    """A part with the first flipped bit after which only single columns can be read."""
    part = runs["ended"] / "trajectories" / "part-1-0-0.parquet"
    good, place = part.read_bytes(), tmp_path / part.name
    columns = pq.read_metadata(part).row_group(0)
    found = [columns.column(n) for n in range(columns.num_columns)]
    (first, *_) = [c for c in found if c.path_in_schema.startswith("metrics.")]
    for at, bit in itertools.product(range(first.data_page_offset, len(good)), range(8)):
        place.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        try:
            for _ in pq.ParquetFile(place).iter_batches(64):
                pass
        except (OSError, pa.ArrowException):
            continue
        if not readable_units(place):
            return place.read_bytes()
    raise AssertionError("no such bit")


def test_undamaged_runs_have_no_faults(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for run in runs.values():
        assert check(run) == ExitCode.DONE, capsys.readouterr().err


def test_changed_stats_json_is_reported(runs: dict[str, Path], place: Path, capsys) -> None:
    shutil.copytree(runs["ended"], place)
    stats = json.loads((place / "stats.json").read_bytes())
    stats["reward"]["solved"] += 1
    (place / "stats.json").write_text(json.dumps(stats))
    assert check(place) == ExitCode.BAD_INPUT
    assert "stats.json: differs from the sums of the commits (reward)" in capsys.readouterr().err


def test_stats_json_of_an_older_version_is_accepted(
    runs: dict[str, Path], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs["ended"], place)
    stats = json.loads((place / "stats.json").read_bytes())
    del stats["calls"]["unsent"]  # runs before it was counted have no such key
    (place / "stats.json").write_text(json.dumps(stats))
    assert check(place) == ExitCode.DONE, capsys.readouterr().err
    del stats["calls"]["total"]
    (place / "stats.json").write_text(json.dumps(stats))
    assert check(place) == ExitCode.BAD_INPUT


async def test_units_with_missing_rows_run_again(runs: dict[str, Path], place: Path) -> None:
    shutil.copytree(runs["ended"], place)
    identity = RunDir(place).epoch(1).identity
    (part,) = place.glob("trajectories/part-1-*.parquet")
    kept = part.read_bytes()
    foreign = part.with_name("part-1-7-7.parquet")
    part.rename(foreign)
    async with await open_run(place, identity) as driver:
        assert driver.ledger.done == 2, "of four"
        assert driver.report.damaged == [
            f"trajectories/{part.name} is missing, but its batch is committed"
        ]
        missing, others = driver.report.notes()
        assert "Units whose rows are gone run again" in missing
        assert f"trajectories/{foreign.name}" in others
    assert load_run(place).ledger.done == 2
    part.write_bytes(kept[: len(kept) // 2])
    foreign.unlink()
    async with await open_run(place, identity) as driver:
        assert driver.ledger.done == 2
    part.write_bytes(kept)
    async with await open_run(place, identity) as driver:
        assert driver.ledger.done == 4
        assert driver.report.notes() == []


@pytest.mark.parametrize("left", ["commits", "trajectories", "journal", "epochs/3"])
async def test_epochs_are_not_reused_after_epochs_was_emptied(
    runs: dict[str, Path], place: Path, left: str
) -> None:
    """One name with an epoch is enough, whatever else is missing."""
    killed = left in ("journal", "epochs/3")
    shutil.copytree(runs["killed" if killed else "ended"], place)
    identity = RunDir(place).epoch(1).identity
    for folder in {"epochs", "commits", "journal", "trajectories"} - {left}:
        shutil.rmtree(place / folder)
        (place / folder).mkdir()
    (place / left).mkdir(exist_ok=True)
    async with await open_run(place, identity, None, OPTIONS) as driver:
        assert driver.epoch == (4 if killed else 3)
        assert driver.report.notes()[-1].startswith("epochs/ lacks")


async def test_a_run_without_digests_is_read(runs: dict[str, Path], place: Path, capsys) -> None:
    """As earlier versions wrote it."""
    shutil.copytree(runs["ended"], place)
    for file in (*place.glob("commits/*.json"), *place.glob("epochs/*.json")):
        content = msgspec.json.decode(file.read_bytes())
        assert content.pop("sha256")
        file.write_bytes(msgspec.json.encode(content))
    assert check(place) == ExitCode.DONE, capsys.readouterr().err
