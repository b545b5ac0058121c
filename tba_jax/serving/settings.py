# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the server."""

import importlib.util
import os

from tba_jax.system import rules

_s = rules.Setting

# fmt: off
SECTIONS = {
    "serve": rules.Section("`--program=serve`: training and sampling over HTTP"
        " (docs/guides/serving.md).", hosts="own"),
}

SETTINGS = {
    "serve.host": _s("127.0.0.1", rules.NAME, "address to listen at; another"
        " than the loopback one speaks TLS, and lets whoever has the key in"),
    "serve.port": _s(8700,
        rules.Allowed("0 to 65535", lambda v: 0 <= v < 2**16),
        "0 = a free one"),
    "serve.tls_cert_file": _s("", rules.TEXT, "certificate, PEM, with those"
        " between it and its authority; '' = one that the server makes, unless"
        " it listens at the loopback address", files=True),
    "serve.tls_key_file": _s("", rules.TEXT, "key of the certificate",
        files=True),
    "serve.tls_names": _s("", rules.TEXT, "names and addresses by which clients"
        " reach the server, for the certificate that it makes, separated by"
        " commas; its address and the host's name are in it anyway"),
    "serve.insecure": _s(False, rules.FLAG, "no TLS made by the server: whoever"
        " listens on the way reads key, prompts and completions"),
    "serve.model_name": _s("", rules.TEXT, "name of the model for clients, some"
        " of which choose a chat format by it; '' = `init`"),
    "serve.max_models": _s(4, rules.COUNT, "models under training in memory;"
        " others are read again when they are used"),
    "serve.micro_batch_tokens": _s(4096, rules.COUNT, "tokens of a forward"
        " pass, padding included"),
    "serve.checkpoint_every_steps": _s(10, rules.COUNT, "optim_steps of a model"
        " between its checkpoints; those after the last are done again after a"
        " kill"),
    "serve.gap_deadline_s": _s(600.0, rules.wait(), "longest wait of a request"
        " for the one with the number before its own"),
}
# fmt: on


def _serve(c: rules.Values) -> rules.Problems:
  keys = ("serve.tls_cert_file", "serve.tls_key_file")
  if any(c[key] for key in keys):
    for key in keys:
      if not os.path.isfile(os.path.expanduser(c[key])):
        yield key, "must be a file that exists, for both of config.serve.tls_*"
    if c["serve.insecure"]:
      yield "serve.insecure", "must be False with config.serve.tls_cert_file"


CHECKS = (_serve,)


def check_packages(flag: str) -> None:
  """Raises ValueError, naming the flag, for a missing package of a server."""
  for name in ("pydantic", "starlette", "uvicorn"):
    if importlib.util.find_spec(name) is None:
      raise ValueError(f"{flag} needs {name}: pip install 'tba_jax[serve]'")
