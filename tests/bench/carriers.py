"""Delta Lake and Lance beside the commits of hermes_rl, as carriers of a run's rows.

    python -m venv /tmp/carriers
    /tmp/carriers/bin/pip install deltalake pylance pyarrow moto[s3,server]
    /tmp/carriers/bin/python tests/bench/carriers.py

Commits of 16 rows of 20 KB, one after the other, each durable on return where the carrier can do
that: the case of slow rollouts. `hermes_rl` is the same work as the store does it: a Parquet part
and a JSON commit, both fsynced and renamed. The kills end a writer at a random moment, 40 times;
then a second writer repeats its commits, and the rows are counted.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

COMMITS, ROWS, KILLS = 100, 16, 40


def rows(n: int) -> Any:
    import pyarrow as pa

    texts = [random.Random(n * ROWS + i).randbytes(10_000).hex() for i in range(ROWS)]
    return pa.table({"unit": [f"{n}-{i}" for i in range(ROWS)], "messages": texts})


def durable(path: Path, write: Any) -> None:
    temporary = path.with_suffix(".tmp")
    write(temporary)
    for what in (temporary, None):
        if what is None:
            os.rename(temporary, path)
        fd = os.open(what or path.parent, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def commit_hermes_rl(root: str, n: int, options: dict[str, str]) -> None:
    import pyarrow.parquet as pq

    base = Path(root)
    (base / "rows").mkdir(parents=True, exist_ok=True)
    (base / "commits").mkdir(exist_ok=True)
    if (base / f"commits/{n}.json").exists():
        return
    durable(base / f"rows/{n}.parquet", lambda p: pq.write_table(rows(n), p, compression="zstd"))
    text = json.dumps({"keys": rows(n)["unit"].to_pylist()})
    durable(base / f"commits/{n}.json", lambda p: p.write_text(text))


def commit_delta(root: str, n: int, options: dict[str, str]) -> None:
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

    if DeltaTable.is_deltatable(root, options):
        done = DeltaTable(root, storage_options=options).transaction_version("writer-0")
        if done is not None and done >= n:
            return
    once = CommitProperties(app_transactions=[Transaction("writer-0", n)])
    write_deltalake(
        root, rows(n), mode="append", commit_properties=once, storage_options=options or None
    )


def commit_lance(root: str, n: int, options: dict[str, str]) -> None:
    import lance

    # Lance has no transaction ids of applications: a repeated commit must look for its rows.
    try:
        known = lance.dataset(root, storage_options=options or None)
        if known.count_rows(f"unit = '{n}-0'"):
            return
    except ValueError:
        known = None
    mode = "append" if known else "create"
    lance.write_dataset(rows(n), root, mode=mode, storage_options=options or None)


def read_units(kind: str, root: str) -> list[str]:
    if kind == "delta":
        from deltalake import DeltaTable

        return list(DeltaTable(root).to_pyarrow_table(columns=["unit"])["unit"].to_pylist())
    if kind == "lance":
        import lance

        return list(lance.dataset(root).to_table(columns=["unit"])["unit"].to_pylist())
    return glob_units(f"{root}/rows")


def glob_units(root: str) -> list[str]:
    import pyarrow.parquet as pq

    parts = sorted(p for p in Path(root).rglob("*.parquet") if "_delta_log" not in p.parts)
    return [u for p in parts for u in pq.read_table(p, columns=["unit"])["unit"].to_pylist()]


COMMIT = {"hermes_rl": commit_hermes_rl, "delta": commit_delta, "lance": commit_lance}


def measure(kind: str, root: str, options: dict[str, str], commits: int) -> str:
    times = []
    for n in range(commits):
        began = time.perf_counter()
        COMMIT[kind](root, n, options)
        times.append((time.perf_counter() - began) * 1000)
    last = statistics.median(times[-10:])
    worst = max(times[5:])
    return f"{statistics.median(times):.0f} ms median, {last:.0f} at the end, {worst:.0f} at most"


def fsyncs(kind: str) -> str:
    if shutil.which("strace") is None:
        return "unknown (no strace)"
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/log"
        command = ["strace", "-f", "-qq", "-e", "trace=fsync,fdatasync", "-o", log]
        subprocess.run([*command, sys.executable, __file__, kind, f"{folder}/t", "10"], check=True)
        return str(Path(log).read_text().count("sync("))


def kills(kind: str) -> str:
    lost = doubled = broken = orphans = 0
    for seed in range(KILLS):
        with tempfile.TemporaryDirectory() as folder:
            root = f"{folder}/t"
            command = [sys.executable, __file__, kind, root, "8"]
            writer = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert writer.stdout
            writer.stdout.readline()  # it has imported everything
            time.sleep(random.Random(seed).uniform(0.0, 0.4))
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            try:
                subprocess.run(command, check=True, capture_output=True)
                units = read_units(kind, root)
            except Exception:
                broken += 1
                continue
            lost += len({f"{n}-{i}" for n in range(8) for i in range(ROWS)} - {*units})
            doubled += len(units) - len({*units})
            if kind == "delta":
                orphans += len(glob_units(root)) - len(units)
    found = f"{lost} rows lost, {doubled} doubled, {broken} unreadable"
    return found + (f", a glob sees {orphans} rows too many" if kind == "delta" else "")


def start_s3() -> tuple[Any, dict[str, str]]:
    """A moto server in another process: delta-rs holds the interpreter lock while it waits."""
    import boto3

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    url = f"http://127.0.0.1:{port}"
    s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    for left in reversed(range(60)):
        try:
            s3.create_bucket(Bucket="bench")
            break
        except Exception:
            if not left:
                raise
            time.sleep(0.5)
    return server, {
        **keys,
        "aws_endpoint": url,
        "aws_region": "us-east-1",
        "allow_http": "true",
        "aws_conditional_put": "etag",
    }


def race(kind: str, options: dict[str, str]) -> str:
    """Two writers, 20 commits each, on one table of the object store."""
    errors: list[str] = []
    root = f"s3://bench/race-{kind}"
    COMMIT[kind](root, 10_000 if kind == "lance" else 0, options)

    def write(name: int) -> None:
        for n in range(20):
            try:
                if kind == "delta":
                    from deltalake import write_deltalake

                    write_deltalake(root, rows(n), mode="append", storage_options=options)
                else:
                    import lance

                    lance.write_dataset(rows(n), root, mode="append", storage_options=options)
            except Exception as error:
                errors.append(str(error).partition("\n")[0][:100])

    threads = [threading.Thread(target=write, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"{len(errors)} of 40 commits refused {errors[:1]}"


def compacted(kind: str, root: str) -> str:
    began = time.perf_counter()
    if kind == "delta":
        from deltalake import DeltaTable

        DeltaTable(root).optimize.compact()
        early = len(glob_units(root))
        DeltaTable(root).vacuum(0, enforce_retention_duration=False, dry_run=False)
        found = f"a glob before vacuum sees {early} rows of {COMMITS * ROWS}"
    else:
        import lance

        dataset = lance.dataset(root)
        dataset.optimize.compact_files()
        found = f"no Parquet files: {len(glob_units(root))} rows by a glob"
    return f"{time.perf_counter() - began:.1f} s; {found}"


def main() -> None:
    server, options = start_s3()
    try:
        for kind in sys.argv[1:2] or COMMIT:
            compare(kind, options)
    finally:
        server.terminate()
        server.wait()


def compare(kind: str, options: dict[str, str]) -> None:
    module = {"hermes_rl": "pyarrow.parquet", "delta": "deltalake", "lance": "lance"}[kind]
    loading = f"import time; t=time.process_time(); import {module}; print(time.process_time()-t)"
    cost = subprocess.run([sys.executable, "-c", loading], capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        root = f"{folder}/t"
        print(f"{kind}: import {float(cost.stdout):.2f} s CPU")
        print(f"{kind}: local {measure(kind, root, {}, COMMITS)}", flush=True)
        print(f"{kind}: {sum(p.is_file() for p in Path(root).rglob('*'))} files", flush=True)
        if kind != "hermes_rl":
            print(f"{kind}: compaction {compacted(kind, root)}", flush=True)
            where = f"s3://bench/{kind}"
            print(f"{kind}: s3 {measure(kind, where, options, 30)}", flush=True)
            print(f"{kind}: s3, two writers: {race(kind, options)}", flush=True)
    print(f"{kind}: {fsyncs(kind)} fsyncs in 10 commits", flush=True)
    print(f"{kind}: {KILLS} kills: {kills(kind)}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        kind, root, count = sys.argv[1:]
        __import__({"hermes_rl": "pyarrow.parquet", "delta": "deltalake", "lance": "lance"}[kind])
        print("ready", flush=True)
        for number in range(int(count)):
            COMMIT[kind](root, number, {})
    else:
        main()
