"""The parts of a source through several processes, each to an Arrow file of its own.

A process gets numbers of parts and gives back counts; neither text nor ids go through a pipe. Processes are started
anew, not forked, and without the script that asks for them.
"""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan_wlb.data.encode import MissingColumn, TextEncoder
from torchtitan_wlb.data.parts import Part, Row, check_columns, rows_of_table
from torchtitan_wlb.data.source_spec import SourceSpec
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import init_logger, logger
from torchtitan_wlb.parent import end_with_parent

_BATCH = 1 << 20  # ids that wait to be written
_SHOWN = 5  # bad rows of a part that are named


class PartWriter:
    """Writes the tokens of parts into a folder.

    Args:
        folder: of <part>.arrow, complete when it has that name, and <part>.json with its counts.
    """

    def __init__(self, spec: SourceSpec, tokenizer: Tokenizer, folder: Path):
        self.spec, self.folder = spec, folder
        self.encoder = spec.encoder(tokenizer)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06}.arrow"

    def write(self, number: int, part: Part) -> dict[str, int]:
        """Tokenise a part: {"rows", "tokens", "bad_rows"}.

        Raises:
            ConfigError: a file that cannot be read, or a bad row that may not be skipped.
        """
        import pyarrow as pa

        has_mask = bool(self.spec.loss_mask_column) or self.spec.format == "messages"
        types = {"input_ids": pa.list_(pa.int32())} | ({"loss_mask": pa.list_(pa.int8())} if has_mask else {})
        schema = pa.schema(types)
        rows = tokens = bad_rows = 0
        kept: list[list] = [[] for _ in types]
        waiting = 0
        unfinished = self.path(number).with_suffix(f".{os.getpid()}.unfinished")
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, schema) as out:
            for where, row in self._rows(part):
                try:
                    if isinstance(row, Exception):
                        raise row
                    encoded = self.encoder(row)
                except (ValueError, TypeError, KeyError) as error:
                    bad_rows += 1
                    self._bad_row(where, error, is_told=bad_rows <= _SHOWN)
                    continue
                for column, values in zip(kept, encoded):
                    column.append(values)
                rows, tokens, waiting = rows + 1, tokens + len(encoded[0]), waiting + len(encoded[0]) + 1
                if waiting >= _BATCH:
                    out.write_batch(_batch(kept, schema))
                    kept, waiting = [[] for _ in types], 0
            if kept[0]:
                out.write_batch(_batch(kept, schema))
        counts = {"rows": rows, "tokens": tokens, "bad_rows": bad_rows}
        about = unfinished.with_suffix(".about")
        about.write_text(json.dumps(counts))
        about.rename(self.path(number).with_suffix(".json"))
        unfinished.rename(self.path(number))
        return counts

    def _bad_row(self, where: str | Callable[[], str], error: Exception, is_told: bool) -> None:
        """Name it, if it may be skipped."""
        if self.spec.bad_rows == "skip" and not is_told:  # to find its line costs time
            return
        where = where if isinstance(where, str) else where()
        message = f"{where}: {str(error)[:300]}"
        if self.spec.bad_rows == "skip":
            logger.warning(f"Skipped: {message}")
            return
        if isinstance(error, MissingColumn):
            check_columns(f"{self.spec.name} {where}", error.has, [error.column])
        raise ConfigError(f"--training.dataset {self.spec.name}: {message}; --training.bad_rows skip passes over such")

    def _rows(self, part: Part) -> Iterator[Row]:
        spec = self.spec
        if spec.source.read:
            assert isinstance(self.encoder, TextEncoder)
            for path in part.paths:
                for text in spec.source.read(path):
                    yield path, {self.encoder.columns[0]: text}
        elif spec.name == "hf":
            dataset = spec.dataset()
            check_columns(f"hf {spec.path}", dataset.column_names, self.encoder.columns)
            for i, row in enumerate(dataset.select_columns(self.encoder.columns).select(range(part.start, part.stop))):
                yield f"{spec.path}, row {part.start + i}", row
        else:
            yield from rows_of_table(part, self.encoder.columns)

    def bad_rows(self, folder: Path) -> int:
        """Rows that were skipped in all parts of a folder."""
        return sum(json.loads(path.read_bytes())["bad_rows"] for path in folder.glob("*.json"))


def _batch(columns: list[list], schema):
    import pyarrow as pa

    return pa.record_batch([pa.array(c, field.type) for c, field in zip(columns, schema)], schema=schema)


def usable_processors() -> int:
    """Processors that this job may use: affinity, control groups, Slurm."""
    counts = [len(os.sched_getaffinity(0))]
    with contextlib.suppress(OSError, IndexError):  # version 2: this group and those that it is in
        mine = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().split("::/")[1].strip()
        for group in (mine, *mine.parents):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (group / "cpu.max").read_text().split()
                counts.append(int(quota) // int(period))
    with contextlib.suppress(OSError, ValueError):  # version 1
        quota, period = (Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{x}_us").read_text() for x in ("quota", "period"))
        counts += [int(quota) // int(period)] if int(quota) > 0 else []
    counts += [int(n)] if (n := os.environ.get("SLURM_CPUS_PER_TASK", "")).isdecimal() else []
    return max(1, min(counts))


def tokenize_parts(writer: PartWriter, parts: Sequence[Part], processes: int) -> None:
    """Write the parts that are not yet there.

    Raises:
        ConfigError: see PartWriter.write; or a process was killed.
    """
    writer.folder.mkdir(exist_ok=True)
    missing = [i for i in range(len(parts)) if not writer.path(i).exists()]
    if len(missing) < len(parts):
        logger.info(f"{len(parts) - len(missing)} of {len(parts)} parts are there already")
    progress = _Progress(sum(parts[i].size for i in missing))
    processes = min(processes, len(missing))
    if processes <= 1:
        for i in missing:
            progress.add(parts[i].size, writer.write(i, parts[i])["tokens"])
        return
    stop = threading.Event()
    workers = [_Worker(writer, parts) for _ in range(processes)]
    todo = iter(missing)
    lock = threading.Lock()

    def work(worker: "_Worker") -> None:
        while not stop.is_set():
            with lock:
                i = next(todo, None)
            if i is None:
                return
            try:
                counts = worker.ask(i)
            except BaseException:
                stop.set()
                raise
            with lock:
                progress.add(parts[i].size, counts["tokens"])

    with ThreadPoolExecutor(processes) as pool:
        try:
            for _ in pool.map(work, workers):
                pass
        finally:  # before the pool waits for its threads, which wait for them
            stop.set()
            for worker in workers:
                worker.end()


class _Worker:
    """A process that writes parts."""

    def __init__(self, writer: PartWriter, parts: Sequence[Part]):
        path = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchtitan_wlb.data.tokenize_parts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self.process.stdin and self.process.stdout
        self._in, self._out = self.process.stdin, self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # it is told when the first part is asked for
            pickle.dump((writer, list(parts)), self._in)
            self._in.flush()

    def ask(self, number: int) -> dict[str, int]:
        with contextlib.suppress(BrokenPipeError):
            self._in.write(f"{number}\n".encode())
            self._in.flush()
        reply = self._out.readline()
        if not reply:
            code = self.process.wait()
            raise ConfigError(f"--training.prepare_processes: a process that tokenises has ended (exit code {code})")
        counts = json.loads(reply)
        if "problems" in counts:
            raise ConfigError(*counts["problems"])
        return counts

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def _serve() -> None:
    """A worker: parts by number from standard input, counts to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asks ends this
    end_with_parent(whoever=True)
    replies, sys.stdout = sys.stdout, sys.stderr
    init_logger()
    writer, parts = pickle.load(sys.stdin.buffer)
    for line in sys.stdin.buffer:
        try:
            reply: dict = writer.write(int(line), parts[int(line)])
        except ConfigError as error:
            reply = {"problems": error.problems}
        except Exception as error:
            reply = {"problems": [f"--training.dataset_path: {type(error).__name__}: {str(error)[:300]}"]}
        print(json.dumps(reply), file=replies, flush=True)


class _Progress:
    """A bar on a terminal, else a line every 30 seconds."""

    def __init__(self, total: int):
        self.total, self.done, self.tokens = max(1, total), 0, 0
        self.began = self.told = time.perf_counter()

    def add(self, size: int, tokens: int) -> None:
        self.done, self.tokens = self.done + size, self.tokens + tokens
        now = time.perf_counter()
        seconds = max(now - self.began, 1e-9)
        left = seconds / self.done * (self.total - self.done) if self.done else 0.0
        text = f"{self.done / self.total:4.0%}, {self.tokens / seconds:,.0f} tokens/s, {left:,.0f} s left"
        if sys.stderr.isatty():
            print(f"\rTokenising {text} ", end="\n" if self.done >= self.total else "", file=sys.stderr, flush=True)
        elif now - self.told > 30:
            self.told = now
            logger.info(f"Tokenising: {text}")


if __name__ == "__main__":
    _serve()
