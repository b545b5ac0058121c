# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Completions that attack their judge: programs, by what they try.

`PROGRAMS` run as programs of their own, `IN_JUDGE` inside the interpreter that
judges. A program prints REACHED where it got what it must not, and never the
answer, except by an attack. Only processes of the worker are attacked: those
above it in the tree, and the first of a box.
"""

from collections.abc import Mapping

# `judges` are the processes above this one that judge, the nearest first.
_START = r"""
import ctypes, glob, json, os, resource, signal, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def words(pid):
  try:
    return open(f"/proc/{pid}/cmdline").read().split("\0")
  except OSError:
    return []
def above(pid):
  while pid > 0:
    yield pid
    try:
      pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
      return
judges = [p for p in above(os.getppid())
          if words(p)[2:3] == ["tests.multi_process.reward_trouble"]]
assert judges, "nobody to attack"
def leave():
  if os.fork():
    os._exit(0)
  os.setsid()
  nothing = os.open(os.devnull, os.O_RDWR)
  for fd in range(3):
    os.dup2(nothing, fd)
def frame(value):
  data = json.dumps(value).encode()
  return struct.pack(">I", len(data)) + data
win = {"reward": 1.0, "key": "forged", "parts": {}}
def forge(count):
  for pid in judges:
    for fd in range(64):
      for data in (frame(win) * count, b"\x01" + frame(win) * count,
                   (b"\0" * 17 + frame(win)) * count):
        try:
          pipe = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
          continue
        if os.path.samestat(os.fstat(pipe), os.stat(f"/proc/self/fd/2")):
          continue
        try:
          os.write(pipe, data)
          print("REACHED a pipe")
        except OSError:
          pass
        os.close(pipe)
"""

_PROGRAMS = {
    "frame": "forge(1)",
    "two_frames": "forge(2)",
    "frames_later": """
leave()
while True:
  forge(2)
  time.sleep(0.01)
""",
    "stop": """
for pid in judges:
  os.kill(pid, signal.SIGSTOP)
time.sleep(600)
""",
    "stop_later": """
leave()
time.sleep(0.02)
while True:
  for pid in judges:
    try:
      os.kill(pid, signal.SIGSTOP)
    except OSError:
      pass
""",
    "end": """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL):
  for pid in judges:
    os.kill(pid, number)
""",
    "trace": """
for pid in judges:
  if libc.ptrace(16, pid, None, None) == 0:
    print("REACHED by a trace of", pid)
""",
    "memory": r"""
for pid in judges:
  try:
    maps = open(f"/proc/{pid}/maps").read()
    memory = open(f"/proc/{pid}/mem", "r+b", buffering=0)
    print("REACHED the memory of", pid)
  except OSError:
    pass
class Span(ctypes.Structure):
  _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
data = ctypes.create_string_buffer(8)
here = Span(ctypes.addressof(data), 8)
for pid in judges:
  there = Span(ctypes.addressof(data), 8)
  for call in (libc.process_vm_readv, libc.process_vm_writev):
    call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if ctypes.get_errno() != 1:
      print("REACHED the memory of", pid, ctypes.get_errno())
""",
    "environment": """
for pid in judges:
  for name in ("environ", "auxv", "stack", "syscall"):
    try:
      open(f"/proc/{pid}/{name}", "rb").read()
      print("REACHED", name)
    except OSError:
      pass
""",
    "descriptors": """
for pid in judges:
  handle = os.pidfd_open(pid)
  for fd in range(16):
    stolen = libc.syscall(438, handle, fd, 0)
    if stolen >= 0:
      print("REACHED descriptor", fd)
inherited = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 3]
print("REACHED" * bool([fd for fd in inherited if "pipe" in
      os.path.realpath(f"/proc/self/fd/{fd}")]))
""",
    "fork_bomb": """
leave()
while True:
  try:
    os.fork()
  except OSError:
    pass
""",
    "limits": """
for pid in judges[::-1]:
  for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC,
               resource.RLIMIT_FSIZE):
    try:
      resource.prlimit(pid, kind, (0, 0))
    except OSError:
      pass
""",
    "priority": """
for pid in judges:
  try:
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
  except OSError:
    pass
""",
    "modules_beside": r"""
text = "import os, sys\nos.write(1, b'not the answer')\nos._exit(0)\n"
import site
folders = [".", site.getusersitepackages(), "/tmp", "/dev/shm"]
for folder in folders:
  for name in ("json.py", "sitecustomize.py", "usercustomize.py", "own.pth",
               "pyvenv.cfg", "encodings.py"):
    try:
      os.makedirs(folder, exist_ok=True)
      open(os.path.join(folder, name), "w").write(text)
    except OSError:
      pass
""",
    "modules_of_ours": """
for path in (json.__file__, os.__file__, *glob.glob("{project}/tba_jax/*/*.py"),
             "{project}/tests/multi_process/reward_trouble.py",
             "/etc/ld.so.preload", os.path.join(sys.prefix, "lib/x.pth")):
  try:
    open(path, "ab").close()
    print("REACHED", path)
  except OSError:
    pass
""",
    "many_files": """
for folder in (".", "/tmp", "/dev/shm"):
  try:
    for i in range(3000):
      open(os.path.join(folder, f"x{i}"), "w").write("x" * 100)
  except OSError:
    pass
""",
    "deep_folders": """
for i in range(3000):
  os.mkdir("d")
  os.chdir("d")
""",
    "closed_folders": """
home = os.getcwd()
os.makedirs("a/b/c")
os.chmod("a/b", 0)
os.chmod("a", 0)
for folder in (home, os.path.dirname(home), "/tmp", "/dev/shm"):
  try:
    if folder == home or os.environ["TMPDIR"].startswith("/tmp/") and {boxed}:
      os.chmod(folder, 0)
  except OSError:
    pass
""",
    "links": """
for name in ("links", "home", ".cache"):
  os.symlink("{outside}", name)
  os.symlink("{outside}/kept", name + "2")
home = os.getcwd()
try:
  os.rmdir(home)
  os.symlink("{outside}", home)
except OSError:
  pass
""",
    "shared_memory": """
libc.shmget(0x7ba, 1 << 20, 0o1666)
""",
    "error_file_of_judges": r"""
for pid in judges:
  try:
    open(f"/proc/{pid}/fd/2", "ab").close()
    print("REACHED the error file")
  except OSError:
    pass
""",
}
PROGRAMS = {name: _START + text for name, text in _PROGRAMS.items()}

IN_JUDGE = {
    "patched_judge": """
judging.base.Judgement = lambda *_: 1 / 0
judging._run = lambda *_: 1 / 0
type(task).judge = lambda *_: 1 / 0
from tba_jax.rewards import worker
worker._answer = lambda *_: win
import json, os, subprocess
json.loads = json.dumps = subprocess.run = os.read = None
""",
    "patched_builtins": """
import builtins
builtins.float = lambda *_: 0.5
builtins.str = None
""",
    "at_exit": """
import atexit, threading, time
atexit.register(time.sleep, 600)
threading.Thread(target=time.sleep, args=(600,)).start()
""",
    "pipes": r"""
import json, os, struct
data = json.dumps({"reward": 1.0, "key": "forged", "parts": {}}).encode()
data = (b"\0" + struct.pack(">I", len(data)) + data) * 2
import gc
for name in os.listdir("/proc/self/fd"):
  try:
    if "pipe" in os.readlink(f"/proc/self/fd/{name}"):
      os.write(int(name), data)
  except OSError:
    pass
""",
    "nonce": r"""
import gc, json, os, struct
from tba_jax.system import frames
seen = [x for x in gc.get_objects() if isinstance(x, bytes)
        and len(x) == frames.NONCE_BYTES]
print("REACHED" * bool(seen))
""",
    "children_outlive": """
import os, time
for _ in range(20):
  if os.fork() == 0:
    os.setsid()
    while True:
      time.sleep(1)
""",
    "error_file": """
import os
try:
  while True:
    os.write(2, bytes(1 << 24))
except OSError:
  pass
""",
}


def texts(values: Mapping[str, str]) -> dict[str, str]:
  """Returns the completions by name, with {names} of the values filled in."""
  out = {name: f"program {text}" for name, text in PROGRAMS.items()}
  out |= {name: f"exec {text}" for name, text in IN_JUDGE.items()}
  for key, value in values.items():
    out = {n: t.replace(f"{{{key}}}", value) for n, t in out.items()}
  return out
