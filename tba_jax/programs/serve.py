# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `serve` program: training and sampling over HTTP, by the Tinker API.

    python -m tba_jax.main --program=serve --config=configs/serve.py \\
        --workdir=runs/serve

prints its address and key once it is ready. If it is killed and restarted, it
continues where it was. docs/reference/server.md documents the protocol.
"""

from collections.abc import Iterator, Sequence
import contextlib
import os
import pathlib
import secrets
import signal
import socket
import ssl
import sys
import threading
from typing import Any

from absl import logging
import ml_collections

from tba_jax.run import run_directory
from tba_jax.serving import settings
from tba_jax.serving import tls as tls_lib
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.transport import addresses

_PREFIX = "tml-"  # The official client accepts only such keys.
# Seconds for the current request to finish when the server is asked to end.
_END_S = 30.0
# Exit status if the engine ended by itself; a restart may continue.
_EXIT_ENGINE = 1
# Maximum concurrent connections; a client holds one for each pending result.
_CONNECTIONS = 4096
# Seconds of compilation after which a message names the program.
_COMPILE_S = 2.0
# JAX's events: a program was lowered, and compiled.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"


def run_serve(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Serves until a signal; returns the exit status."""
  try:
    if operands:
      raise ValueError(f"operands {' '.join(operands)}: must be left out")
    settings.check_packages("--program=serve")
    lock = run_directory.lock(workdir)
  except ValueError as error:
    return processes.refuse(error)
  try:
    return _serve(config, workdir)
  finally:
    os.close(lock)


def report_compiling(after_s: float = _COMPILE_S) -> None:
  """Prints on stderr which programs take longer than some seconds to compile.

  The first requests of a new size wait for compilation.
  """
  import jax

  timers: dict[int, threading.Timer] = {}
  say = lambda text: print(text, file=sys.stderr, flush=True)

  def on_event(
      event: str, duration_s: float, *, fun_name: str = "", **_: Any
  ) -> None:
    thread = threading.get_ident()
    timer = timers.pop(thread, None)
    if timer is not None:
      timer.cancel()
    if event == _LOWERED:  # Compilation begins now.
      line = f"compiling {fun_name}, for requests of a new size"
      timers[thread] = threading.Timer(after_s, say, (line,))
      timers[thread].daemon = True
      timers[thread].start()
    elif event == _COMPILED and duration_s > after_s:
      say(f"compiled {fun_name} in {duration_s:.0f} s")

  jax.monitoring.register_event_duration_secs_listener(on_event)


def _serve(config: ml_collections.ConfigDict, workdir: str) -> int:
  import uvicorn

  from tba_jax.serving import app as app_lib
  from tba_jax.serving import connections
  from tba_jax.serving import engine as engine_lib
  from tba_jax.serving import handlers

  processes.prepare_compiling()
  report_compiling()
  processes.raise_open_files()
  try:
    # Listen before loading the model, which may take minutes.
    listener = _listen(config.serve.host, config.serve.port)
    folder = pathlib.Path(workdir) / "serve"
    key, tls = load_or_make_key(folder), _tls(config.serve, folder / "tls")
    waiters = handlers.Waiters()
    print(f"loading {config.init}", file=sys.stderr, flush=True)
    engine = engine_lib.Engine(config, workdir, waiters.notify)
  except ValueError as error:
    return processes.refuse(error)
  except OSError as error:  # For example, the journal is damaged.
    return processes.refuse(
        f"{error}; restore the file, or give another --workdir than {workdir}"
    )
  errors: list[Exception] = []

  def run_engine() -> None:
    try:
      engine.run()
    # The journal cannot be read, and without it no promise can be kept.
    except Exception as error:
      logging.exception("the engine has ended")
      errors.append(error)
      server.should_exit = True

  thread = threading.Thread(target=run_engine, name="engine", daemon=True)
  app = app_lib.make(engine, waiters, thread, key)
  host, port = listener.getsockname()[:2]
  shown = f"[{host}]" if ":" in host else host

  class Server(uvicorn.Server):
    """Server that prints its address once ready; ends cleanly on a signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
      # uvicorn's handler re-raises the signal before the engine has ended.
      handlers = {
          number: signal.signal(number, self.handle_exit)
          for number in (signal.SIGINT, signal.SIGTERM)
      }
      try:
        yield
      finally:
        for number, handler in handlers.items():
          signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
      await super().startup(sockets)
      print(f"serving on {'https' if tls else 'http'}://{shown}:{port}")
      if tls == _model_files(folder / "tls"):
        print(f"authority {folder / 'tls' / tls_lib.CA}")
      print(f"key {key}", flush=True)

    async def shutdown(
        self, sockets: list[socket.socket] | None = None
    ) -> None:
      waiters.close()
      await super().shutdown(sockets)

  server = Server(
      uvicorn.Config(
          app,
          http=connections.Protocol,
          # Do not log requests by strangers, which could fill the disk.
          log_level="error",
          access_log=False,
          limit_concurrency=_CONNECTIONS,
          timeout_graceful_shutdown=1,
          **tls,
      )
  )
  thread.start()
  server.run(sockets=[listener])
  engine.stop()
  thread.join(timeout=_END_S)
  if thread.is_alive():
    print(
        f"the engine did not end within {_END_S:.0f} s; what it was doing is"
        " done again at the next start",
        file=sys.stderr,
    )
  if errors:
    print(f"error: {errors[0]}", file=sys.stderr)
    return _EXIT_ENGINE
  return processes.EXIT_OK


def _listen(host: str, port: int) -> socket.socket:
  """Returns a listening socket; raises ValueError if that fails."""
  try:
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(1024)
  except OSError as error:
    raise ValueError(
        f"config.serve.host={host!r}, config.serve.port={port}: {error};"
        " must be an address of this machine and a free port"
    ) from error
  return listener


def _model_files(folder: pathlib.Path) -> dict[str, str]:
  """Returns uvicorn's arguments for the files that the server makes."""
  return {
      "ssl_certfile": str(folder / tls_lib.CERT),
      "ssl_keyfile": str(folder / tls_lib.KEY),
  }


def _tls(
    config: ml_collections.ConfigDict, folder: pathlib.Path
) -> dict[str, str]:
  """Returns uvicorn's TLS settings; {} without TLS.

  Args:
    config: section `serve`.

  Raises:
    ValueError: the files are not a certificate and its key, or a name is
      invalid.
  """
  if config.tls_cert_file:
    files = [
        os.path.expanduser(file)
        for file in (config.tls_cert_file, config.tls_key_file)
    ]
    try:
      ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
          *files, password=""
      )
    except OSError as error:
      raise ValueError(
          f"config.serve.tls_cert_file={config.tls_cert_file},"
          f" config.serve.tls_key_file={config.tls_key_file}: {error}; must be"
          " a certificate and its key, PEM, without a passphrase"
      ) from error
    return dict(zip(("ssl_certfile", "ssl_keyfile"), files))
  if addresses.is_loopback(config.host):
    return {}
  if config.insecure:
    print(
        f"warning: whoever listens on the way to {config.host} reads the key,"
        " prompts and completions: config.serve.insecure = True",
        file=sys.stderr,
    )
    return {}
  tls_lib.make(folder, tls_lib.names_of(config.host, config.tls_names))
  return _model_files(folder)


def load_or_make_key(folder: pathlib.Path) -> str:
  """Returns the server's key, made at first start; ValueError if empty."""
  path = folder / "key"
  if not path.exists():
    with jsonl.replacing(path, private=True) as file:
      file.write(f"{_PREFIX}{secrets.token_urlsafe(32)}\n".encode())
  key = path.read_text().strip()
  if not key:
    raise ValueError(
        f"{path} is empty: delete it for a new key, or write the old one"
    )
  return key
