# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A store serves one trainer's directory: whoever comes second is refused.

Two trainers would each grant the same prompts, acknowledge the other's blocks
and take each other's params back. Epochs tell apart only the starts of one
directory; this tells apart directories.
"""

from tba_jax.transport import base
from tba_jax.transport import wire

_KEY = "meta/trainer"


class TakenError(ValueError):
  """The store serves the trainer of another directory."""


class Claim:
  """What a trainer writes into a store before anything else."""

  def __init__(self, *, run_id: str, secret: bytes, owner: str, place: str):
    """Writes nothing yet.

    Args:
      run_id: the run.
      secret: key of the run's messages.
      owner: name of the trainer's directory; a copy of it has the same.
      place: of the directory, for people.
    """
    self._run_id = run_id
    self._secret = secret
    self._owner = owner
    self._place = place

  def take(self, transport: base.Transport) -> None:
    """Makes the store this trainer's; done where it is.

    Raises:
      TakenError: it is another one's.
      TransportError: as of the transport.
    """
    message = {"run": self._run_id, "key": _KEY, "owner": self._owner}
    message["place"] = self._place
    data = wire.encode_message(message, self._secret)
    if transport.put(_KEY, data, overwrite=False):
      return
    held = transport.get(_KEY)
    try:
      other = held and wire.decode_placed(
          held, self._secret, self._run_id, _KEY
      )
    except wire.WireError:
      other = None  # Nobody's who has the secret.
    if not other:
      transport.put(_KEY, data)
    elif other["owner"] != self._owner:
      raise TakenError(
          f"{self._place}: this store serves the trainer of {other['place']};"
          " go on there, or start the store anew"
      )
