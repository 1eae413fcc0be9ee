"""The command that shows an exchange, as a person runs it."""

import json

from absl import flags
from absl.testing import flagsaver
import pytest

from launch import inspect_exchange
from tests.analysis import journals
from tests.analysis import workdirs


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('run')
  workdirs.write(folder)
  return journals.write_all(folder)


def run(*arguments):
  with flagsaver.flagsaver():
    rest = flags.FLAGS(['inspect_exchange.py', *arguments])
    inspect_exchange.main(rest)


def test_flags_choose_rounds_and_rollouts(folder, tmp_path, capsys):
  path = tmp_path / 'values.json'
  run(
    folder, f'--json={path}', '--rounds=1', '--show=9', '--policy=llama',
    '--prompt=p0',
  )  # fmt: skip
  text = capsys.readouterr().out
  assert 'in round 2, of 3' in text
  assert text.count('\nllama->gemma, round 2, p0, sample ') == 4
  assert '\ngemma->llama, round' not in text
  assert json.loads(path.read_text())['residuals']['llama->gemma']
  run(folder, '--round=0', '--show=0')
  text = capsys.readouterr().out
  assert 'in round 0, of 3' in text
  assert 'sample' not in text


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['nowhere\x1b'], r'no exchange in nowhere\\x1b: looked for POLICY/'),
    ([], 'name one folder'),
    (['{}', '--policy=lama'], 'there is, for example, --policy=gemma'),
    (['{}', '--json={}/none/a'], 'No such file or directory'),
  ],
)
def test_a_mistake_ends_the_command_with_a_message(folder, arguments, message):
  with pytest.raises(SystemExit, match=message):
    run(*(argument.format(folder) for argument in arguments))
