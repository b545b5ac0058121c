# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K as a TFDS data set, prepared and read without TensorFlow.

    python -m tba_jax.tasks.gsm8k_data data [--manual_dir=FOLDER]

downloads the published JSONL files, or takes train.jsonl and test.jsonl from
FOLDER, and writes ArrayRecord files into data/gsm8k/1.0.0, for
`config.task.data`. A folder with the two JSONL files serves as well, without
preparation.
"""

import argparse
from collections.abc import Iterator, Sequence
import json
import pathlib

from etils import epath
import tensorflow_datasets as tfds

_URL = (
    "https://raw.githubusercontent.com/openai/grade-school-math/master/"
    "grade_school_math/data/"
)
SPLITS = ("train", "test")


class Gsm8kBuilder(tfds.core.GeneratorBasedBuilder):
  """8,792 word problems of grade-school mathematics with worked solutions."""

  name = "gsm8k"
  VERSION = tfds.core.Version("1.0.0")
  MANUAL_DOWNLOAD_INSTRUCTIONS = (
      "train.jsonl and test.jsonl of openai/grade-school-math; where the folder"
      " does not have them, they are downloaded."
  )
  # Folder in which TFDS searches for descriptions.
  pkg_dir_path = epath.Path(__file__).parent
  url = _URL

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
        builder=self,
        description=self.__doc__,
        features=tfds.features.FeaturesDict(
            {
                "question": tfds.features.Text(),
                "answer": tfds.features.Text(),
            }
        ),
        homepage="https://github.com/openai/grade-school-math",
        # Keeps row numbers equal to line numbers of the files.
        disable_shuffling=True,
    )

  def _split_generators(
      self, dl_manager: tfds.download.DownloadManager
  ) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
    try:
      folder = dl_manager.manual_dir
      paths = {split: folder / f"{split}.jsonl" for split in SPLITS}
      exist = all(path.exists() for path in paths.values())
    except AssertionError:  # There is no manual folder.
      exist = False
    if not exist:
      urls = {split: f"{self.url}{split}.jsonl" for split in SPLITS}
      paths = dl_manager.download(urls)
    return {split: self._generate_examples(paths[split]) for split in SPLITS}

  def _generate_examples(
      self, path: epath.Path
  ) -> Iterator[tuple[int, dict[str, str]]]:
    with epath.Path(path).open("r", encoding="utf-8") as f:
      for number, line in enumerate(f):
        row = json.loads(line)
        yield number, {name: row[name] for name in ("question", "answer")}


def prepare(folder: str, *, manual_dir: str | None) -> pathlib.Path:
  """Prepares the data set in `folder` if needed; returns the data set's folder.

  The rows come from train.jsonl and test.jsonl in `manual_dir`; None downloads
  them.
  """
  builder = Gsm8kBuilder(data_dir=folder, file_format="array_record")
  builder.download_and_prepare(
      download_config=tfds.download.DownloadConfig(
          manual_dir=manual_dir, register_checksums=False
      )
  )
  return pathlib.Path(builder.data_dir)


def main(argv: Sequence[str] | None = None) -> None:
  """Prepares the data set from the command line."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("folder")
  parser.add_argument("--manual_dir")
  args = parser.parse_args(argv)
  print(prepare(args.folder, manual_dir=args.manual_dir))


if __name__ == "__main__":
  main()
