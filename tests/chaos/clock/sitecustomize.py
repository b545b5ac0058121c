# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A wall clock that another process sets, in Python processes with this folder
on PYTHONPATH: `time.time()` adds the seconds in the file TBA_JAX_CLOCK_FILE.

Clocks of libraries that are not Python's stay as they are.
"""

import mmap
import os
import struct
import time

_path = os.environ.get("TBA_JAX_CLOCK_FILE")
if _path:
  with open(_path, "rb") as _file:
    _offset = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
  _time, _time_ns = time.time, time.time_ns

  def _jump_s() -> float:
    return struct.unpack("<d", _offset[:8])[0]

  time.time = lambda: _time() + _jump_s()
  time.time_ns = lambda: _time_ns() + int(_jump_s() * 1e9)
