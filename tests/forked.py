"""Programs that tests start, forked from a server process that has imported the common modules.

A program has its own environment, arguments, pipes and signals. It starts before JAX has
initialized its devices, and exits like a program that was started with Python. All programs share a
cache of compiled programs.
"""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings

_PRELOADED = (
    "jax, jax.numpy, jax.experimental.multihost_utils, numpy, orbax.checkpoint, "
    "jstep.loop, jstep.summary"
)
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}

cpu_seconds = 0.0
"""CPU time of the programs that have ended."""

_compiled = []
"""The directory with compiled programs, if there is one."""


def cache_compiled_programs(directory):
    """Share compiled programs between this process and all programs that it starts, now and in
    later runs."""
    _compiled[:] = [directory]
    _enable_compilation_cache(directory)


class Program:
    """A running program with the interface of `subprocess.Popen` in text mode."""

    def __init__(self, pid, exit_status, pipes):
        self.pid, self._exit_status, self.returncode = pid, exit_status, None
        self.stdin, self.stdout, self.stderr = pipes
        self._readers = []
        self._output = {}

    def poll(self):
        """Return the exit code, or None while the program runs."""
        return self._ended(0)

    def wait(self, timeout=None):
        """Wait for the program to end and return its exit code."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0)
        return code

    def _ended(self, timeout):
        if self.returncode is None and select.select([self._exit_status], [], [], timeout)[0]:
            global cpu_seconds
            status, cpu = os.read(self._exit_status, 64).split()
            os.close(self._exit_status)
            self.returncode = os.waitstatus_to_exitcode(int(status))
            cpu_seconds += float(cpu)
        return self.returncode

    def communicate(self, timeout=None):
        """Wait for the program to end and return its stdout and stderr."""
        until = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
        if not self._readers:
            for name in ("stdout", "stderr"):
                if getattr(self, name) is not None:
                    self._readers.append(
                        threading.Thread(target=self._read, args=(name,), daemon=True)
                    )
                    self._readers[-1].start()
        for reader in self._readers:
            reader.join(None if until is None else max(0.0, until - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0)
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return self._output.get("stdout", ""), self._output.get("stderr", "")

    def _read(self, name):
        with getattr(self, name) as pipe:
            self._output[name] = pipe.read()

    def send_signal(self, number):
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # It has ended, and the server has not said so yet.
                os.kill(self.pid, number)

    def terminate(self):
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self):
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.wait()


def start(code, *args, env=None, stderr=None):
    """Start `python -c code args…`.

    Args:
        code: The program.
        *args: Its arguments.
        env: Changes to its environment. Variables that JAX reads on import only affect programs
            that it starts.
        stderr: A file descriptor for its stderr; None for a pipe.
    """
    ends = [os.pipe() for _ in range(4)]
    (in_, parent_in), (parent_out, out), (parent_err, err), (parent_exit, exit_status) = ends
    child_fds = [in_, out, err if stderr is None else stderr, exit_status]
    # The current environment, not that of the test that started the server: fixtures set variables.
    environment = os.environ | _ENVIRONMENT | (env or {})
    request = {
        "code": code,
        "args": [str(arg) for arg in args],
        "env": dict(environment),
        "cwd": os.getcwd(),
    }
    pid = _server().fork(request, child_fds)
    for end in (in_, out, err, exit_status):
        os.close(end)
    if stderr is not None:
        os.close(parent_err)
    errors = os.fdopen(parent_err) if stderr is None else None
    return Program(pid, parent_exit, [os.fdopen(parent_in, "w"), os.fdopen(parent_out), errors])


class _Server:
    """The process that programs are forked from."""

    def __init__(self):
        self._lock = threading.Lock()
        self._control, server_end = socket.socketpair()
        self._own = contextlib.ExitStack()
        directory = (
            _compiled[0] if _compiled else self._own.enter_context(tempfile.TemporaryDirectory())
        )
        arguments = server_end.fileno(), _PRELOADED, directory
        path = str(pathlib.Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {path!r}); import forked; "
        code += f"code = forked.serve{arguments}; del sys.path[0], forked\nexec(code)"
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=os.environ | _ENVIRONMENT,
                pass_fds=[server_end.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def fork(self, request, fds):
        """Start a program and return its pid; `fds` are stdin, stdout, stderr and a pipe for the
        exit status."""
        with self._lock:
            data = json.dumps(request).encode()
            socket.send_fds(self._control, [b"%16d" % len(data)], fds)
            self._control.sendall(data)
            return int(self._control.recv(16))

    def close(self):
        """End the server and all programs that are still running."""
        self._control.close()
        self._process.wait()
        self._own.close()


@functools.cache
def _server():
    return _Server()


def serve(fd, preloaded, compiled):
    """Run the server, which forks on request. In a forked program, return the program's code."""
    exec(f"import {preloaded}")
    _enable_compilation_cache(compiled)
    control = socket.socket(fileno=fd)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 100)
            while running:
                pid, status, used = os.wait4(-1, os.WNOHANG)
                if not pid:
                    break
                with contextlib.suppress(BrokenPipeError):
                    os.write(running[pid], b"%d %f" % (status, used.ru_utime + used.ru_stime))
                os.close(running.pop(pid))
        if control not in ready:
            continue
        head, fds, _, _ = socket.recv_fds(control, 16, 4)
        if not head:  # the tests have ended
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        request = json.loads(control.recv(int(head), socket.MSG_WAITALL))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, stream in enumerate(fds[:3]):
                os.dup2(stream, number)
            control.close()
            for unused in (*fds, *running.values(), woken, wake):
                os.close(unused)
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            sys.argv[1:] = request["args"]
            # Line buffering makes each line one write, so that XLA's log lines do not split the
            # output of a `print`.
            for output in (sys.stdout, sys.stderr):
                output.reconfigure(line_buffering=True, write_through=False)
            return compile(request["code"], "<string>", "exec")
        running[pid] = fds.pop()
        for stream in fds:
            os.close(stream)
        control.sendall(b"%16d" % pid)


def _enable_compilation_cache(directory):
    """Share compiled programs between all programs."""
    import jax

    if jax.__version_info__ < (0, 10, 2):
        return  # older versions warn on stderr about cached programs
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A program that is killed while it writes leaves an incomplete entry, which is compiled again.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
