# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every setting of a run: default, allowed values and meaning.

Each folder lists its settings in its `settings.py`, as `system/rules.py`
defines them. `get_config`, the checks of types and ranges (`validate.py`),
`--help KEY` and `docs/reference/settings.md` (`reference.py`) use these tables.
"""

from typing import Any

import ml_collections

from tba_jax.evaluation import settings as evaluation
from tba_jax.learning import settings as learning
from tba_jax.losses import settings as losses
from tba_jax.models import settings as models
from tba_jax.policy import settings as policy
from tba_jax.programs import settings as programs
from tba_jax.replay import settings as replay
from tba_jax.rewards import settings as rewards
from tba_jax.run import settings as run
from tba_jax.sampling import settings as sampling
from tba_jax.serving import settings as serving
from tba_jax.system import rules
from tba_jax.tasks import settings as tasks
from tba_jax.tools import settings as tools
from tba_jax.transport import settings as transport
from tba_jax.transport.groups import settings as groups

_OWNERS = (
    policy,
    tasks,
    models,
    losses,
    sampling,
    groups,
    replay,
    rewards,
    learning,
    evaluation,
    transport,
    run,
    programs,
    tools,
    serving,
)
SECTIONS: dict[str, rules.Section] = {}
SETTINGS: dict[str, rules.Setting] = {}
for _owner in _OWNERS:
  SECTIONS |= _owner.SECTIONS
  SETTINGS |= _owner.SETTINGS


# Value that undoes a config file's setting, so that a rule chooses again.
AUTO = "auto"


class Open(ml_collections.FieldReference):
  """Default of an `auto` setting that records whether it was overridden.

  is_open: True until a value is set, and again once it is set to `AUTO`.
  """

  def __init__(self, default: bool | int | float | str):
    self._default = default
    super().__init__(default)
    self.is_open = True

  def set(self, value: Any, type_safe: bool = True) -> None:
    self.is_open = isinstance(value, str) and value == AUTO
    super().set(self._default if self.is_open else value, type_safe)

  def __deepcopy__(self, memo: dict[int, Any]) -> "Open":
    del memo
    out = Open(self._default)
    if not self.is_open:
      out.set(self.get(), type_safe=False)
    return out


def open_keys(config: ml_collections.ConfigDict) -> list[str]:
  """Returns the keys of `auto` settings that are not set, in order.

  A copy with resolved references has none: all its values count as set.
  """
  return [
      key for key in SETTINGS if SETTINGS[key].auto and is_open(config, key)
  ]


def is_open(config: ml_collections.ConfigDict, key: str) -> bool:
  """Returns whether the setting is not set, so that a rule chooses it."""
  *sections, name = key.split(".")
  for section in sections:
    config = config.get(section, {})
  if not isinstance(config, ml_collections.ConfigDict) or name not in config:
    return False
  # Above, a missing key: validation rejects the config.
  field = dict(config.items(preserve_field_references=True))[name]
  return isinstance(field, Open) and field.is_open


def get_config() -> ml_collections.ConfigDict:
  """Returns the base config, with every setting at its default."""
  tree = {}
  for key, setting in SETTINGS.items():
    *sections, name = key.split(".")
    node = tree
    for section in sections:
      node = node.setdefault(section, {})
    node[name] = setting.default
    if setting.auto:
      node[name] = Open(setting.default)
    if setting.allowed.is_over_steps:  # A number or a string.
      node[name] = ml_collections.FieldReference(setting.default, object)
  return ml_collections.ConfigDict(tree)


def is_over_steps(key: str) -> bool:
  """Returns whether a setting may be a ramp over steps (`ramps.py`)."""
  return key in SETTINGS and SETTINGS[key].allowed.is_over_steps


def fixed(key: str) -> rules.Fixed | None:
  """Returns why a setting must not change when a run is resumed, or None."""
  reason = SETTINGS[key].fixed if key in SETTINGS else None
  if reason is None and rules.section(key) in SECTIONS:
    reason = SECTIONS[rules.section(key)].fixed
  if isinstance(reason, str):
    return rules.Fixed(reason) if reason else None
  return reason


def names_files(key: str) -> bool:
  """Returns whether a setting may name local files or folders."""
  if key not in SETTINGS:
    section, _, name = key.partition(".")
    return section == "task" and name in tasks.NAMING_FILES
  return SETTINGS[key].files


def hosts(key: str) -> str:
  """Returns how a setting may differ between hosts; see `Setting.hosts`."""
  section, _, name = key.partition(".")
  if section == "task":
    is_file, is_path = name in tasks.FILES, name in tasks.PATHS
    return "own" if is_file else "path" if is_path else "same"
  if key not in SETTINGS:
    return "same"
  of_key = SETTINGS[key].hosts
  return SECTIONS[section].hosts if name and of_key == "same" else of_key
