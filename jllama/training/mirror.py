"""A run in a bucket: a working folder on this machine, and the copy of it that others go on from.

Training writes to the working folder, as it would to any. A thread copies it to the bucket, so that
no step waits for a server:

- A file is copied whole whenever it has changed: a bucket has no append.
- A checkpoint is copied file by file, each process its own part. The logs up to its step follow,
  and then ``complete.json``: a bucket has no rename, and without this file there is no checkpoint.
- One process owns the run: a bucket has no locks, but only one process can create a file.

A run that goes on begins with what is in the bucket.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jllama.core import JllamaError
from jllama.formats.bucket import COMPLETE, COPIES, OWNERS, STEP_FILE, committed, link_checkpoints
from jllama.parallel import distributed
from jllama.system.files import CHECKPOINTS, Json, cache_folder, errors_as, remove
from jllama.system.places import PLACE, as_place
from jllama.system.remote import delete, download, list_files, patiently, upload
from jllama.system.stop import Stopped

if TYPE_CHECKING:
    from upath import UPath

EVERY_S = 15.0
"""How often files that have changed are copied, at most; copying takes at most a tenth of the
time."""
BEAT_S = 15.0
"""How often an owner shows that it is alive."""
STALE_S = 60.0
"""How long an owner may show nothing before another process takes the run over."""
_ARRAYS = re.compile(rf"{CHECKPOINTS}/\d+/(params|state)/")


def working_folder(run_dir: str, index: int) -> Path:
    """Return the folder of a run: for one in a bucket, a process's own in the cache."""
    place = as_place(run_dir)
    if isinstance(place, Path):
        return place
    key = hashlib.sha256(str(place).encode()).hexdigest()[:16]
    return cache_folder() / "runs" / f"{key}-{index}" / place.name


@contextlib.contextmanager
def mirrored(folder: Path, run_dir: str) -> Iterator[None]:
    """Make ``folder`` a working copy of a run in a bucket, inside the block; leave others alone.

    The block ends when everything is in the bucket.

    Raises:
        JllamaError: another process has the run, or the bucket cannot be read or written.
    """
    place = as_place(run_dir)
    if isinstance(place, Path):
        yield
        return
    owner = None
    if distributed.process_index() == 0:
        owner = Owner(place)
    try:
        distributed.max_over_processes(0)
        mirror = Mirror(folder, place, owner)
        end_together = True
        try:
            yield
        except BaseException as error:
            end_together = isinstance(error, Stopped)
            raise
        finally:
            mirror.close()
            if end_together:  # while one copies, the others must stay
                distributed.max_over_processes(0)
        for name in (CHECKPOINTS, COPIES):  # loggers may still write what is small
            remove(folder / name)
    finally:
        if owner:
            owner.release()


class Mirror:
    """Copies a working folder to a bucket, in a thread.

    Process 0 has an ``owner``. It copies what people read, and makes checkpoints complete.
    """

    def __init__(self, folder: Path, place: "UPath", owner: "Owner | None") -> None:
        self.folder = folder
        self.place = place
        self.owner = owner
        self.error: JllamaError | None = None

        # Begin with what is in the bucket. Arrays are read when they are needed.
        files = list_files(place)
        whole = committed(files)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if not path.name.startswith("in_use"):
                remove(path)
        needed = {name: facts for name, facts in whole.items() if not _ARRAYS.match(name)}
        download(place, folder, needed)
        (folder / PLACE).write_text(str(place))
        self.steps = {step[1] for step in map(STEP_FILE.match, whole) if step}
        (folder / COPIES).mkdir()
        self.copied = self._files()
        if owner:
            matches = [step for step in map(STEP_FILE.match, files) if step]
            delete(place, [step[0] for step in matches if step[1] not in self.steps])

        # Copy what changes.
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._copy_all, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy the rest, and end; ``JllamaError`` if anything could not be copied."""
        if self.owner and self._linked_steps():
            print(f"copying the last checkpoint to {self.place}", file=sys.stderr)
        self._ends.set()
        self._thread.join()
        if self.error:
            raise self.error

    def _copy_all(self) -> None:
        """Copy files until the end; if that fails for good, stop the run as a SIGTERM would."""
        due_s = 0.0
        try:
            while True:
                ends = self._ends.wait(0.5)
                begin_s = time.monotonic()
                if ends or self._linked_steps() or begin_s > due_s:
                    self._copy()
                    now_s = time.monotonic()
                    due_s = now_s + max(EVERY_S, 10 * (now_s - begin_s))
                if ends:
                    return
        except Exception as error:
            advice = f"the run stops; until it goes on, its last files are in {self.folder}"
            self.error = JllamaError(f"{error}; {advice}")
            self.error.__cause__ = error
            has_handler = callable(signal.getsignal(signal.SIGTERM))
            if has_handler and not self._ends.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    def _copy(self) -> None:
        """Copy new checkpoints and changed files, and delete what is no longer here."""
        linked = self._linked_steps()
        for step in linked:
            is_saved = (self.folder / CHECKPOINTS / str(step)).exists()
            if step != linked[-1] and not is_saved and jax.process_count() == 1:
                remove(self.folder / COPIES / str(step))  # a newer one has taken its place
                continue
            self._copy_checkpoint(str(step))
            self.steps.add(str(step))
        if self.owner:
            self.owner.check()
            self._copy_files()
        saved = {path.name for path in (self.folder / CHECKPOINTS).glob("*")}
        if self._linked_steps() or not saved.intersection(self.steps):
            return  # there must always be a complete one
        for step in self.steps - saved:
            if self.owner:
                place = self.place / CHECKPOINTS / step
                delete(place, [COMPLETE])
                delete(place, list_files(place))
            self.steps.remove(step)

    def _linked_steps(self) -> list[int]:
        """Return the steps that are saved here and not in the bucket, oldest first."""
        link_checkpoints(self.folder)
        return sorted(
            int(path.name) for path in (self.folder / COPIES).glob("*") if path.name.isdecimal()
        )

    def _copy_checkpoint(self, step: str) -> None:
        """Copy this process's part of a checkpoint; as the owner, make it complete."""
        copy = self.folder / COPIES / step
        target = self.place / CHECKPOINTS / step
        if self.owner:
            self.owner.check()
        names = [name for name in list_files(copy) if self.owner or name.count("/") > 1]
        upload(copy, target, names)
        if self.owner is None:
            part = f"{target.path}/part.{jax.process_index()}"
            patiently(target, target.fs.pipe_file, part, b"")
        else:
            # Wait until the other processes have copied their parts.
            parts = {f"part.{index}" for index in range(1, jax.process_count())}
            while parts and not parts <= list_files(target).keys():
                time.sleep(0.5)
            self._copy_files()
            self.owner.check()
            content = json.dumps({"step": int(step), "processes": jax.process_count()})
            patiently(target, target.fs.pipe_file, f"{target.path}/{COMPLETE}", content.encode())
        with contextlib.suppress(OSError):  # it is no longer here
            (self.folder / CHECKPOINTS / step / COMPLETE).touch()
        remove(copy)

    def _copy_files(self) -> None:
        """Copy the files that have changed, and delete those that are gone."""
        files = self._files()
        changed = [name for name, facts in files.items() if self.copied.get(name) != facts]
        copies = self.folder / COPIES / "files"
        for name in changed:
            # A copy, since a log may grow meanwhile.
            (copies / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(self.folder / name, copies / name)
        upload(copies, self.place, [name for name in changed if (copies / name).exists()])
        delete(self.place, self.copied.keys() - files.keys())
        if changed:
            remove(copies)
        self.copied = files

    def _files(self) -> Json:
        """Return the files that are no checkpoints, with their sizes and times."""
        files: Json = {}
        for path in self.folder.iterdir():
            if path.name.startswith((".", "in_use", CHECKPOINTS)):
                continue
            for name, facts in list_files(path).items():
                files[f"{path.name}/{name}".rstrip("/")] = facts
        return files


class Owner:
    """The right of this process to write to a run in a bucket, until it is released.

    Owners are numbered, and the last one is valid. Each creates its own file, which two processes
    cannot, and writes it again every ``BEAT_S`` seconds.
    """

    def __init__(self, place: "UPath") -> None:
        self.place = place
        self.folder = place / OWNERS
        self.record: Json = {
            "process": os.getpid(),
            "host": platform.node(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": _machine(),
            "beats": 0,
        }
        self.number = 0
        while not self._claim():
            pass
        delete(self.folder, [str(number) for number in self._numbers() if number < self.number])
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise ``JllamaError`` if another process has taken the run over."""
        if max(self._numbers(), default=0) > self.number:
            raise JllamaError(f"another process has taken over {self.place}")

    def release(self) -> None:
        """Let others have the run."""
        self._ends.set()
        self._thread.join()
        self.record["released"] = True
        with contextlib.suppress(JllamaError):
            self._write("overwrite")

    def _claim(self) -> bool:
        """Create the file after the last one, if its owner is gone; return whether that worked."""
        try:
            self.number = 1 + self._wait_for_last()
        except FileNotFoundError:  # another process has claimed it
            return False
        with (
            contextlib.suppress(FileExistsError),
            errors_as(f"{self.place} cannot be written", FileNotFoundError),
        ):
            self._write("create")
            return True
        return False

    def _wait_for_last(self) -> int:
        """Return the number of the last owner, when it is gone.

        Raises:
            JllamaError: it is alive.
        """
        number = max(self._numbers(), default=0)
        seen: Json = {}
        since_s = 0.0
        while number:
            begin_s = time.monotonic()
            file = self.folder / str(number)
            record = json.loads(patiently(file, file.fs.cat_file, file.path))
            now_s = time.monotonic()
            name = "process {process} on {host} since {since}".format_map(record)
            is_here = record["machine"] == self.record["machine"] != ""
            is_gone = is_here and not _is_alive(record["process"])
            if is_gone or "released" in record:
                break
            if not seen:
                since_s = now_s
                print(
                    f"note: {self.place} was in use by {name}; waiting up to {STALE_S:.0f} s to "
                    "see whether that is still so",
                    file=sys.stderr,
                )
            elif record != seen:
                raise JllamaError(
                    f"{self.place} is in use by {name}: wait for it, or choose another run_dir"
                )
            elif now_s - begin_s > BEAT_S:  # a slow server delays the owner as well
                since_s = now_s
            elif now_s - since_s > STALE_S:
                break
            seen = record
            time.sleep(1)
        return number

    def _numbers(self) -> list[int]:
        return [int(name) for name in list_files(self.folder) if name.isdecimal()]

    def _write(self, mode: str) -> None:
        file = self.folder / str(self.number)
        content = json.dumps(self.record).encode()
        patiently(file, file.fs.pipe_file, file.path, content, mode=mode)

    def _beat(self) -> None:
        while not self._ends.wait(BEAT_S):
            self.record["beats"] += 1
            with contextlib.suppress(JllamaError):  # what else is copied fails as well
                self._write("overwrite")


def _machine() -> str:
    """Return what tells the processes of this machine, or container, from those of others."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot.strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _is_alive(process: int) -> bool:
    """Return whether another process with this number is running here."""
    return process != os.getpid() and Path(f"/proc/{process}").exists()
