# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which accelerators each process of a run gets."""

import contextlib
import ctypes
import importlib.util
import io
import os
import pathlib
import stat
import subprocess
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import settings
from tba_jax.system import accelerators
from tba_jax.system import processes

_AUTO = {"trainer": "", "searcher": ""}
_CPU = {"JAX_PLATFORMS": "cpu"}
_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def _gpus(count):
  return accelerators.Accelerators("gpu", tuple(map(str, range(count))))


def _chips(count):
  return accelerators.Accelerators("tpu", tuple(map(str, range(count))))


def _visible(environments, name="CUDA_VISIBLE_DEVICES"):
  return [env[name] for env in environments]


class AssignTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.dict(os.environ))
    os.environ.pop(_SHARE, None)

  def test_assigns_one_device_each_in_turn(self):
    """One trainer and three searchers on four GPUs, as the TBA paper has."""
    out = accelerators.assign(_gpus(4), _AUTO, [1], [1, 1, 1])
    self.assertEqual(_visible(out["trainer"]), ["0"])
    self.assertEqual(_visible(out["searcher"]), ["1", "2", "3"])

  def test_meshes_get_their_devices(self):
    out = accelerators.assign(_gpus(8), _AUTO, [2, 2], [2])
    self.assertEqual(_visible(out["trainer"]), ["0,1", "2,3"])
    self.assertEqual(_visible(out["searcher"]), ["4,5"])

  def test_settings_choose(self):
    chosen = {"trainer": "2-3", "searcher": "0"}
    out = accelerators.assign(_gpus(4), chosen, [2], [1])
    self.assertEqual(_visible(out["trainer"]), ["2,3"])
    self.assertEqual(_visible(out["searcher"]), ["0"])
    out = accelerators.assign(
        _gpus(2), {"trainer": "", "searcher": "0"}, [1], [1]
    )
    self.assertEqual(_visible(out["trainer"]), ["1"])
    out = accelerators.assign(
        _gpus(1), {"trainer": "", "searcher": "cpu"}, [1], [1, 1]
    )
    self.assertEqual(out["searcher"], [_CPU, _CPU])
    self.assertEqual(out["trainer"], [{"CUDA_VISIBLE_DEVICES": "0"}])

  def test_accelerators_of_parent_are_split(self):
    mine = accelerators.Accelerators("gpu", ("GPU-a", "GPU-b"))
    out = accelerators.assign(mine, _AUTO, [1], [1])
    self.assertEqual(_visible(out["trainer"]), ["GPU-a"])
    self.assertEqual(_visible(out["searcher"]), ["GPU-b"])

  def test_single_gpu_is_shared(self):
    out = accelerators.assign(_gpus(1), _AUTO, [1], [1, 1])
    shares = [float(env[_SHARE]) for envs in out.values() for env in envs]
    self.assertLen(shares, 3)
    self.assertBetween(sum(shares), 0.8, 0.95)
    own = {_SHARE: ".3"}
    with mock.patch.dict(os.environ, own):
      out = accelerators.assign(_gpus(1), _AUTO, [1], [1])
    self.assertEqual(out["trainer"], [{"CUDA_VISIBLE_DEVICES": "0"}])
    alone = accelerators.assign(_gpus(1), _AUTO, [1], [])
    self.assertEqual(alone["trainer"], [{"CUDA_VISIBLE_DEVICES": "0"}])

  @parameterized.parameters(({}, "0.9"), ({_SHARE: ".45"}, ".45"))
  def test_process_takes_its_share_of_gpu(self, own, expected):
    with mock.patch.dict(os.environ, own):
      accelerators.prepare()
      self.assertEqual(os.environ[_SHARE], expected)

  @parameterized.parameters(
      (_gpus(1), "", "--xla_gpu_enable_command_buffer="),
      (_gpus(2), "--a=b", "--a=b --xla_gpu_enable_command_buffer="),
      (
          _gpus(1),
          "--xla_gpu_enable_command_buffer=FUSION",
          "--xla_gpu_enable_command_buffer=FUSION",
      ),
      (accelerators.Accelerators("cpu"), "--a=b", "--a=b"),
  )
  def test_threads_on_gpu_record_no_graphs(self, here, own, expected):
    # On an H200 with jax 0.11.2 a trainer with its searchers beside it died of
    # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED after a few steps.
    with (
        mock.patch.dict(os.environ, {"XLA_FLAGS": own}),
        mock.patch.object(accelerators, "find", lambda: here),
    ):
      accelerators.prepare()
      self.assertEqual(os.environ["XLA_FLAGS"], expected)

  def test_tpu_chips_are_split_within_host(self):
    out = accelerators.assign(_chips(8), _AUTO, [4], [2, 2])
    (trainer,), searchers = out["trainer"], out["searcher"]
    self.assertEqual(trainer["TPU_VISIBLE_CHIPS"], "0,1,2,3")
    self.assertEqual(trainer["TPU_CHIPS_PER_PROCESS_BOUNDS"], "2,2,1")
    self.assertEqual(_visible(searchers, "TPU_VISIBLE_CHIPS"), ["4,5", "6,7"])
    self.assertEqual(searchers[0]["TPU_CHIPS_PER_PROCESS_BOUNDS"], "1,2,1")
    ports = {env["TPU_PROCESS_PORT"] for env in (trainer, *searchers)}
    self.assertLen(ports, 3)

  def test_single_tpu_chip_is_trainers(self):
    out = accelerators.assign(_chips(1), _AUTO, [1], [1])
    self.assertEqual(out, {"trainer": [{}], "searcher": [_CPU]})

  @parameterized.parameters(
      (_gpus(2), _AUTO, [1], [1, 1], "config.devices.searcher"),
      (_gpus(2), _AUTO, [4], [1], "config.devices.trainer"),
      (_gpus(2), {"trainer": "5", "searcher": ""}, [1], [1], "trainer='5'"),
      (
          accelerators.Accelerators("cpu"),
          {"trainer": "0", "searcher": ""},
          [1], [1], "config.devices.trainer='0'",
      ),
      (_chips(4), _AUTO, [1, 1], [1], "trainer.num_processes"),
      (_chips(8), _AUTO, [3], [1], "TPU chips"),
  )  # fmt: skip
  def test_refuses_by_key(self, found, devices, trainers, searchers, text):
    with self.assertRaisesRegex(ValueError, text):
      accelerators.assign(found, devices, trainers, searchers)

  def test_virtual_devices_are_of_cpu(self):
    config = settings.get_config()
    config.trainer.cpu_devices = 2
    config.mesh.data = 2
    with mock.patch.object(accelerators, "find", return_value=_gpus(2)):
      out = accelerators.of_run(config)
    self.assertEqual(out["trainer"], [_CPU])
    self.assertEqual(_visible(out["searcher"]), ["0"])
    self.assertEqual(accelerators.describe(out["trainer"]), "cpu")


class MemoryTest(parameterized.TestCase):

  def memory(self, machine, listed=""):
    accelerators.list_gpus.cache_clear()
    self.addCleanup(accelerators.list_gpus.cache_clear)
    done = mock.Mock(stdout=listed)
    error = None if listed else FileNotFoundError()
    with (
        mock.patch.object(accelerators, "find", return_value=machine),
        mock.patch.object(
            subprocess, "run", return_value=done, side_effect=error
        ),
    ):
      return accelerators.memory()

  def test_gpus_have_memory_of_smallest(self):
    listed = "0, 81559, NVIDIA H100\n1, 40960, NVIDIA A100\n"
    kind, gib, count, name = self.memory(_gpus(2), listed)
    self.assertEqual((kind, gib, count), ("gpu", 40, 2))
    self.assertEqual(name, "2 x NVIDIA A100, 40 GiB each")
    # No program says it.
    self.assertEqual(self.memory(_gpus(2))[1], 16)

  @parameterized.parameters(
      ("v5litepod-8", "v5e", 16), ("v5p-8", "v5p", 95), ("", "v5e", 16)
  )
  def test_chips_have_memory_of_their_generation(self, text, kind, gib):
    with mock.patch.dict(os.environ, TPU_ACCELERATOR_TYPE=text):
      self.assertEqual(self.memory(_chips(4))[:3], (kind, gib, 4))

  def test_cpu_is_one_device_with_machines_memory(self):
    none = accelerators.Accelerators("cpu")
    with mock.patch.object(
        processes, "memory", return_value=(24 * 2**30 + 5, "")
    ):
      self.assertEqual(self.memory(none)[:3], ("cpu", 24, 1))


class OneProcessTest(parameterized.TestCase):

  def config(self, **changes):
    config = settings.get_config()
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return config

  @parameterized.parameters(
      (_gpus(1), {}, True),
      (_chips(1), {}, True),
      (_gpus(2), {}, False),
      (accelerators.Accelerators("cpu"), {}, False),
      (_gpus(1), {"trainer__num_processes": 2}, False),
      (_gpus(1), {"search__mesh__data": 2}, False),
      (_gpus(1), {"devices__searcher": "cpu"}, False),
      (_gpus(1), {"trainer__cpu_devices": 1}, False),
      (_gpus(1), {"store__address": "10.0.0.1:7000"}, False),
      (_gpus(1), {"store__locator": "10.0.0.1:7001"}, False),
      (_chips(1), {"run__processes": "many"}, False),
      (_gpus(4), {"run__processes": "one"}, True),
  )
  def test_one_process_is_chosen_on_single_accelerator(
      self, found, changes, expected
  ):
    config = self.config(**changes)
    with mock.patch.object(accelerators, "find", return_value=found):
      one, why = accelerators.one_process(config)
    self.assertEqual(one, expected)
    self.assertNotEmpty(why)

  @parameterized.parameters(
      (_chips(1), {}), (_gpus(1), {"CUDA_VISIBLE_DEVICES": "0"})
  )
  def test_process_owns_accelerator(self, found, expected):
    with mock.patch.object(accelerators, "find", return_value=found):
      out = accelerators.of_run(self.config(), alone=True)
    self.assertEqual(out, {"trainer": [expected], "searcher": []})


class FindTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(mock.patch.object(accelerators, "DEV", self.folder))
    self.packages = {"libtpu", "jax_cuda12_plugin"}
    self.enter_context(
        mock.patch.object(
            importlib.util, "find_spec", lambda name: name in self.packages
        )
    )
    self.enter_context(mock.patch.dict(os.environ, {"PATH": str(self.folder)}))
    accelerators.list_gpus.cache_clear()
    self.addCleanup(accelerators.list_gpus.cache_clear)

  def add_gpus(self, count, status=0):
    script = self.folder / "nvidia-smi"
    rows = "".join(f"echo '{i}, 81559, H100'; " for i in range(count))
    script.write_text(f"#!/bin/sh\n{rows}exit {status}")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)

  def driver(self, status=0):
    """Returns CUDA's driver with two GPUs, as functions of Python."""

    def write(pointer, value):
      pointer._obj.value = value
      return 0

    def write_name(buffer, size, device):
      buffer.value = f"GPU {device.value}".encode()
      return 0

    return types.SimpleNamespace(
        cuInit=lambda flags: status,
        cuDeviceGetCount=lambda count: write(count, 2),
        cuDeviceGet=lambda device, i: write(device, i),
        cuDeviceTotalMem_v2=lambda size, device: write(
            size, (80 - device.value) << 30
        ),
        cuDeviceGetName=write_name,
    )

  def test_asks_cuda_driver_without_nvidia_smi(self):
    def run(command, **unused):
      if command[0] == "nvidia-smi":
        raise FileNotFoundError
      with (
          contextlib.redirect_stdout(io.StringIO()) as out,
          mock.patch.object(ctypes, "CDLL", return_value=self.driver()),
      ):
        exec(command[2], {})  # pylint: disable=exec-used
      return mock.Mock(stdout=out.getvalue())

    with mock.patch.object(subprocess, "run", side_effect=run):
      result = accelerators.find({})
      self.assertEqual((result.kind, result.ids), ("gpu", ("0", "1")))
      os.environ.pop("JAX_PLATFORMS", None)  # Until the test's end.
      self.assertEqual(
          accelerators.memory(), ("gpu", 79, 2, "2 x GPU 1, 79 GiB each")
      )

  def test_driver_without_gpu_is_not_error(self):
    for status, message in ((100, None), (3, "cuInit: CUDA error 3")):
      with mock.patch.object(ctypes, "CDLL", return_value=self.driver(status)):
        with self.assertRaises(SystemExit) as end:
          exec(accelerators.ASK_CUDA, {})  # pylint: disable=exec-used
      self.assertEqual(end.exception.code, message)
    # Without a driver.
    with mock.patch.object(ctypes, "CDLL", side_effect=OSError):
      with self.assertRaises(SystemExit) as end:
        exec(accelerators.ASK_CUDA, {})  # pylint: disable=exec-used
    self.assertIsNone(end.exception.code)

  def test_driver_failure_is_reported_once(self):
    self.add_gpus(1, status=9)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
      self.assertEqual(accelerators.find({}).kind, "cpu")
      self.assertEqual(accelerators.find({}).kind, "cpu")
    self.assertEqual(stderr.getvalue().count("nvidia-smi failed"), 1)

  def test_finds_cpus_with_products_of_bfloat16(self):
    for flags, expected in (
        ("fpu avx512f avx512_bf16 avx512_vnni", True),
        ("fpu amx_bf16 amx_tile", True),
        ("fpu avx2 avx512f avx512_bf16x", False),
    ):
      path = self.folder / "cpuinfo"
      path.write_text(f"model name\t: A CPU\nflags\t\t: {flags}\nbugs\t:\n")
      self.assertEqual(accelerators.multiplies_bfloat16(path), expected, flags)
    # Some kernels have no such file.
    self.assertFalse(accelerators.multiplies_bfloat16(self.folder / "none"))

  def test_finds_none(self):
    self.assertEqual(accelerators.find({}).kind, "cpu")

  def test_finds_gpus(self):
    self.add_gpus(2)
    self.assertEqual(accelerators.find({}), _gpus(2))
    visible = accelerators.find({"CUDA_VISIBLE_DEVICES": "1"})
    self.assertEqual(visible.ids, ("1",))
    self.assertEqual(accelerators.find({"JAX_PLATFORMS": "cpu"}).kind, "cpu")
    hidden = accelerators.find({"CUDA_VISIBLE_DEVICES": ""})
    self.assertEqual(hidden.kind, "cpu")
    self.packages.discard("jax_cuda12_plugin")
    self.assertEqual(accelerators.find({}).kind, "cpu")

  def test_finds_tpu_chips(self):
    for i in range(4):
      (self.folder / f"accel{i}").touch()
    self.assertEqual(accelerators.find({}), _chips(4))
    self.packages.discard("libtpu")
    self.assertEqual(accelerators.find({}).kind, "cpu")

  def test_finds_newer_tpu_chips(self):
    (self.folder / "vfio").mkdir()
    for name in ("0", "1", "vfio"):
      (self.folder / "vfio" / name).touch()
    self.assertEqual(accelerators.find({}), _chips(2))
