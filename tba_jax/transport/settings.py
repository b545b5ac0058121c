# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the store, and of the transfer of params."""

from tba_jax.system import rules
from tba_jax.transport import addresses
from tba_jax.transport.params import carriers

_s = rules.Setting

# fmt: off
SECTIONS = {
    "publish": rules.Section("Transfer of new params to the searchers."),
    "store": rules.Section(
        "The key-value store (docs/guides/scaling.md).", hosts="own"),
}

SETTINGS = {
    "publish.every_steps": _s(1, rules.COUNT, "steps between two versions;"
        " where searchers run free, also between two waits for all that they"
        " have in work"),
    # A searcher may still be reading the version before the newest.
    "publish.keep_versions": _s(2, rules.at_least(2), "versions that stay"
        " readable", hosts="searcher"),
    "publish.carrier": _s(
        "auto", rules.one_of("auto", *carriers.CARRIERS),
        ", ".join(f"{name!r} ({entry.suits})"
                  for name, entry in carriers.CARRIERS.items())
        + ", 'auto' by size and place",
        hosts="searcher"),
    "publish.address": _s("", addresses.HOST_PORTS, "address at which each"
        " process of the trainer serves params ('network'): 'HOST:0' a free"
        " port, 'HOST:7011-7019' one of a range; '' = a free port of the"
        " address from which it reaches the store", hosts="own"),
    "publish.directory": _s("", rules.TEXT, "place of files and shards: a"
        " shared directory, for shards also gs://…; '' = memory of this host"
        " (/dev/shm, else the run's directory)", hosts="searcher"),
    "publish.dtype": _s("auto", rules.one_of("auto", "", "float32", "bfloat16"),
        "dtype of published floats; 'auto' = matrices in the dtype that the"
        " trainer's device computes in, which costs a sampler that computes in"
        " the same nothing; '' = as trained. A searcher that computes in"
        " another dtype casts on its host, 1.5 B params in some 10 s"),

    "store.address": _s("", addresses.HOST_PORTS, "'' = a unix socket in the"
        " spool directory; 'HOST:0' a free TCP port, 'HOST:7001-7009' one of a"
        " range (docs/guides/scaling.md)"),
    "store.locator": _s("", addresses.HOST_PORT, "address at which the store"
        " announces its own to other hosts; '' = a file in the spool"
        " directory"),
    "store.secret_file": _s("", rules.TEXT, "32 bytes, mode 0600; '' = created"
        " in the spool directory", files=True),
    "store.tls_cert_file": _s("", rules.TEXT, "mutual TLS (jax 0.11.2), PEM:"
        " this host's certificate; '' = files made from the secret, if the run"
        " has a port", files=True),
    "store.tls_key_file": _s("", rules.TEXT, "key of this host", files=True),
    "store.tls_ca_file": _s("", rules.TEXT, "certificate of the authority",
        files=True),
    "store.insecure": _s(False, rules.FLAG, "no TLS made from the secret, and"
        " other hosts even without a secret (docs/guides/scaling.md)"),
    "store.spool_dir": _s("", rules.TEXT, "'' = a 0700 directory of this user"
        " and workdir"),
    "store.deadline_s": _s(60.0, rules.WAIT, "limit of one operation, a restart"
        " of the service included, and for a piece of the params to arrive; a"
        " service silent for a third of it, at most 5 s, is restarted"),
}
# fmt: on
