import collections
import json

import pytest

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.data import prompts
from tests import examples


def jsonl_config(path, **changes):
  return examples.run_config(
    **{
      'data.source': 'jsonl',
      'data.jsonl.train': str(path),
      'data.jsonl.heldout': str(path),
      **changes,
    }
  ).data


def write(path, *lines):
  path.write_text('\n'.join(lines) + '\n', encoding='utf-8')
  return path


def test_the_id_of_a_jsonl_prompt_is_its_file_and_line(tmp_path):
  path = write(
    tmp_path / 'a.jsonl',
    json.dumps({'question': 'What?', 'answer': 3}),
    '',
    json.dumps({'question': 'Why?', 'answer': '#### 4'}),
  )
  loaded = prompts.load(jsonl_config(path), 'train', '')
  assert [(p.id, p.text, p.answer) for p in loaded] == [
    (f'{path}:1', 'What?', '3'),
    (f'{path}:3', 'Why?', '#### 4'),
  ]


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"question": "What?"', 'not JSON'),
    ('[1]', 'not a JSON object'),
    ('{"question": "What?"}', "no text or number in 'answer'"),
    ('{"question": ["What?"], "answer": 1}', "no text or number in 'question'"),
    ('{"question": "", "answer": 1}', "no text or number in 'question'"),
    ('{"question": "a", "answer": " "}', "no text or number in 'answer'"),
    ('{"question": "a", "answer": true}', "no text or number in 'answer'"),
    ('{"question": "a", "answer": NaN}', "no text or number in 'answer'"),
    ('{"question": "a", "answer": 1e999}', "no text or number in 'answer'"),
    (
      '{"question": "\\ud800", "answer": 1}',
      "'question' has half of a surrogate",
    ),
    ('{"question": "a", "answer": %s}' % ('9' * 5000), 'not JSON in UTF-8'),
    ('[' * 10**5, 'not JSON in UTF-8'),
  ],
  ids=range(12),
)
def test_the_error_for_a_malformed_line_names_file_and_line(
  tmp_path, line, message
):
  path = write(tmp_path / 'a.jsonl', '{"question": "a", "answer": 1}', line)
  with pytest.raises(checks.InputError, match=rf'a\.jsonl:2: {message}'):
    prompts.load(jsonl_config(path), 'train', '')


def test_the_error_for_bytes_that_are_not_text_names_the_line(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'{"question": "a", "answer": 1}\n{"question": "\xff"}\n')
  with pytest.raises(checks.InputError, match=r'a\.jsonl:2: not JSON in UTF-8'):
    prompts.load(jsonl_config(path), 'train', '')


def test_large_numbers_are_kept(tmp_path):
  line = json.dumps({'question': 1.5, 'answer': 10**400})
  (prompt,) = prompts.load(
    jsonl_config(write(tmp_path / 'a.jsonl', line)), 'train', ''
  )
  assert (prompt.text, prompt.answer) == ('1.5', f'1{"0" * 400}')


def test_missing_and_empty_files_are_errors(tmp_path):
  with pytest.raises(checks.InputError, match=r"jsonl.train='.*nowhere.jsonl'"):
    prompts.load(jsonl_config(tmp_path / 'nowhere.jsonl'), 'train', '')
  empty = write(tmp_path / 'empty.jsonl')
  with pytest.raises(checks.InputError, match='no train prompt'):
    prompts.load(jsonl_config(empty), 'train', '')


def prompts_of(**families):
  """Prompts of families, whose sizes are given."""
  return [
    records.Prompt(id=f'{family}{i}', text='', answer='', family=family)
    for family, n in families.items()
    for i in range(n)
  ]


def test_prompts_of_families_and_of_sources_without_families():
  known = prompts_of(add=2, sub=1)
  chosen = prompts.of_families(known, ('add',))
  assert [prompt.id for prompt in chosen] == ['add0', 'add1']
  with pytest.raises(checks.InputError, match="unknown family 'adds'"):
    prompts.of_families(known, ('adds',))
  nameless = prompts_of(**{'': 2})
  assert prompts.of_families(nameless, ('add',)) == nameless


def test_balanced_prompts_take_turns_between_families():
  drawn = prompts.balanced(prompts_of(a=10, b=2, c=10), 10, seed=0)
  count = collections.Counter(p.family for p in drawn)
  assert count == {'a': 4, 'b': 2, 'c': 4}
  assert len({p.id for p in drawn}) == 10
  assert prompts.balanced(prompts_of(a=10, b=2, c=10), 10, seed=1) != drawn
  assert len(prompts.balanced(prompts_of(a=3), 10, seed=0)) == 3
