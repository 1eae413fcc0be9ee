"""One page tells what a run did, and obeys nothing that it shows."""

import html as html_lib
import json
import os
import re
import shutil
import subprocess

import pytest

from mrl_jax import checks
from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.report import page
from tests.analysis.report import pages
from tests.analysis.report import workdirs

HOSTILE = '</pre></style></svg><script>alert(1)</script>\u202e\x00"\'&{{ 7*7 }}'


def render(folder, **fields):
  text = page.render(run_lib.read(workdirs.write(folder, **fields)))
  return pages.check(text).text


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The page of a run that ended, as text with and without markup."""
  folder = tmp_path_factory.mktemp('runs') / 'mine'
  path = page.write(workdirs.write(folder))
  assert path == os.path.join(folder, 'report.html')
  with open(path, encoding='utf-8') as f:
    return f.read()


def test_it_tells_what_ran_and_what_came_of_it(whole):
  text = pages.check(whole).text
  for part in (
    'prp , seed 3: finished, 4 rounds.',
    '25.0 ±2.0 → 75.0 ±2.0 before and after 4 rounds: +50.0 points',
    'Mean of the policies 25.0 ±2.0 → 75.0 ±2.0',
    'words/add 12.5 → 37.5',
    'Rounds 4 of 4',
    'Time 26 s, median round 4 s',
    'Rollouts sampled 128',
    'Records exchanged 80',
    'tokenizer byte_level vocabulary 367 devices 0–3 mesh fsdp 4',
    'memory each 1 MiB load 93%',
    'KL to the policy at the start : none, as method.kl_weight is 0.',
    'gemma, by llama 50.0%',
    'Refused : nothing.',
    'llama → gemma, rollout 40 records, 8 KiB 28 used 8 stale 4 waiting',
    'refused 8 (25%) – as too_long 8, 120 B',
    'tokens of the receiver 160 (+100.0%)',
    'segmentation error 25.0%',
    '1:1 chunks 33.3% 1:n chunks 66.7%',
    'start 10 s, 38.5% sampling 4 s, 15.4% updates 10 s, 38.5%',
    'gemma: best, after 4 rounds prompt sort 3 1 completion = 1 3',
    'wrong , reward 1, 6 tokens, -0.250 nats a token, ended by itself',
    'All 7 keys',
    'template "{prompt}\\n"',
  ):
    assert part in text
  assert 'What is missing' not in text


def test_accuracy_in_training_is_drawn_where_it_is_not_the_reward(whole):
  assert 'Accuracy in training' in whole
  rows = {'gemma': [run_lib.Row(round=0, policy='', reward=1, accuracy=1)]}
  run = run_lib.Run(
    folder='', written=None, config={}, settings=run_lib.Settings(), plan=None,
    rows=rows, evaluations={}, summary=None, problems=[],
  )  # fmt: skip
  assert 'accuracy' not in [curve.field for curve in page.learning(run)]


def test_links_lead_to_sections(whole):
  found = pages.Page(whole)
  links = {v[1:] for k, v in found.attributes if k == 'href'}
  assert {'result', 'thl', 'config'} < links <= {*found.ids}


def hostile(value):
  """All texts replaced, and those of keys that are not fields."""
  if isinstance(value, str):
    return HOSTILE
  if isinstance(value, list):
    return [hostile(one) for one in value]
  if isinstance(value, dict):
    return {key: hostile(one) for key, one in value.items()}
  return value


def test_text_from_anywhere_is_inert(tmp_path):
  names = (f'a{HOSTILE}', f'b{HOSTILE}')
  workdirs.write(tmp_path, policies=names, refused={HOSTILE: 3})
  path = tmp_path / 'evaluations.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  rows = [
    {
      **hostile(row),
      'policy': row['policy'],
      'accuracy': {'all': 0.5, HOSTILE: 0.5},
    }
    for row in rows
  ]
  path.write_text(workdirs.lines(rows))
  path = tmp_path / 'plan.json'
  plan = json.loads(path.read_text())
  plan = {**hostile(plan), 'elsewhere': {f'c{HOSTILE}': HOSTILE}}
  path.write_text(json.dumps(plan))
  path = tmp_path / 'config.json'
  config = {**json.loads(path.read_text()), HOSTILE: HOSTILE}
  path.write_text(json.dumps({**config, 'method.name': HOSTILE}))
  with open(tmp_path / 'metrics.jsonl', 'a', encoding='utf-8') as f:
    f.write(json.dumps({'round': 0, 'policy': 'a', 'reward': HOSTILE}) + '\n')
  text = page.render(run_lib.read(tmp_path))
  assert not {'\u202e', '\x00'} & {*text}
  found = pages.check(text)
  inert = (
    '</pre></style></svg><script>alert(1)</script>\\u202e\\x00"\'&{{ 7*7 }}'
  )
  assert found.text.count(inert) > 30


def test_lines_of_completions_are_lines_and_long_ones_are_cut():
  lines, more = page.clip('a\r\n\tb' + 'c' * 5_000)
  assert lines[0] == 'a\r'
  assert (sum(map(len, lines)) + 1, more) == (2_000, 3_005)


@pytest.mark.parametrize('rounds', [0, 2])
def test_a_run_that_did_not_end_has_a_page(tmp_path, rounds):
  text = render(tmp_path, rounds=rounds, refused={'incompatible': 7})
  if rounds:
    assert 'after 2 of 4 rounds: it still runs, or was stopped' in text
    assert 'Summed over the rounds in metrics.jsonl' in text
    assert 'gemma, in its lessons: incompatible 14' in text
  else:
    assert 'before its first round of 4' in text
    assert '25.0 ±2.0 before' in text
    assert text.count('No round is done yet.') == 5
  assert 'What is missing' not in text


def test_what_is_missing_or_damaged_is_told_at_the_top(tmp_path):
  workdirs.write(tmp_path)
  for name in ('plan.json', 'config.json', 'summary.json'):
    (tmp_path / name).write_text('{')
  (tmp_path / 'evaluations.jsonl').unlink()
  rows = (tmp_path / 'metrics.jsonl').read_text()
  (tmp_path / 'metrics.jsonl').write_text('?\n' * 50 + rows[:-9])
  text = pages.check(page.render(run_lib.read(tmp_path))).text
  told, _, rest = text.partition('Result Plan')
  for part in (
    'Unknown method : after 4 rounds',
    'plan.json left out: not JSON',
    'config.json left out: not JSON',
    'metrics.jsonl, line 1 left out: not JSON, Expecting value at character 1',
    '15 more',
  ):
    assert part in told
  assert 'Not known without a plan.json.' in rest
  assert 'Not known without a config.json.' in rest


def test_a_run_of_nothing_but_a_config_has_a_page(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  text = pages.check(page.render(run_lib.read(tmp_path))).text
  assert 'metrics.jsonl is missing' in text
  assert 'before its first round' in text


def test_a_method_without_exchange_says_so(tmp_path):
  text = render(
    tmp_path, policies=('llama',), rounds=1, peer={}, peer_rows=0,
    rescued_by={}, config={'method.name': 'grpo'},
  )  # fmt: skip
  assert 'No records were exchanged: grpo takes nothing of peers' in text
  assert 'THL had nothing to carry' in text
  assert (
    "Peers' tokens clipped; Largest ratio, peers' tokens; Effective sample "
    "size, peers; Log-probability of peers' tokens; Importance ratios, peers' "
    "tokens : none, as no row of a peer's was trained on." in text
  )


def test_numbers_that_are_not_finite_do_not_break_it(tmp_path):
  nan, inf = float('nan'), float('inf')
  text = render(
    tmp_path, rounds=2, reward=nan, entropy=inf, grad_norm=1e300,
    rescued_by={'gemma': nan}, timing={'seconds': nan, 'phases': {'a': inf}},
  )  # fmt: skip
  assert 'has numbers that are not finite' in text
  assert 'Reward : none, as metrics.jsonl has no reward.' in text


def test_a_folder_without_a_run_gets_no_page(tmp_path):
  with pytest.raises(checks.InputError, match='give the work dir of a run'):
    page.write(os.fspath(tmp_path))
  assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
  ('devices', 'text'),
  [([0, 1, 2, 3], '0–3'), ([4], '4'), ([0, 2], '0, 2'), ([], '–')],
)
def test_devices_are_a_span_where_none_is_missing(devices, text):
  assert page.span(devices) == text


def test_configs_are_in_groups():
  config = {'a.b.c': 1, 'seed': 2, 'policies.x.y.z': 3, 'policies.x.w': 4}
  assert page.grouped(config) == {
    'a': {'b.c': 1}, 'policies.x': {'w': 4, 'y.z': 3}, '': {'seed': 2},
  }  # fmt: skip


def test_parts_of_a_bar_keep_their_places():
  parts = page.stack({'new': 1, 'b': 2, 'c': 0, 'a': 1}, ('a', 'b', 'c'))
  assert [(name, n, share, style.color) for name, n, share, style in parts] == [
    ('a', 1, 0.25, 'area0'), ('b', 2, 0.5, 'area1'), ('new', 1, 0.25, 'area3'),
  ]  # fmt: skip


def test_the_mean_is_known_where_all_are():
  def result(before, after):
    of = page.Accuracy('all', before, 0.02, after, 0.04)
    return page.Result('a', 0, 4, of, [])

  assert page.mean([result(0.2, 0.4), result(0.4, None)]) == page.Accuracy(
    'mean', pytest.approx(0.3), 0.02, None, 0.04
  )


_WRAPPER = """<!DOCTYPE html><meta charset="utf-8">
<iframe id="f" style="width:{width}px;height:900px;border:0" srcdoc="{page}">
</iframe><script>onload = () => {{
  const inside = f.contentDocument
  document.title = [
    inside.documentElement.scrollWidth, inside.documentElement.clientWidth,
    inside.querySelectorAll('figure svg').length,
    f.contentWindow.performance.getEntriesByType('resource').length].join(' ')
}}</script>"""


@pytest.mark.slow
@pytest.mark.parametrize('width', [390, 1280])
def test_in_a_browser_it_is_as_wide_as_its_window(tmp_path, width):
  browser = shutil.which('chromium') or shutil.which('google-chrome')
  if not browser:
    pytest.skip('it takes a chromium on the PATH')
  names = ('gemma', 'a_policy_with_a_name_of_more_letters_than_a_phone_is_wide')
  folder = workdirs.write(tmp_path / 'run', policies=names, rounds=30)
  text = page.render(run_lib.read(folder))
  # Details are wide, too.
  text = html_lib.escape(text.replace('<details', '<details open'))
  path = tmp_path / 'wrapper.html'
  path.write_text(_WRAPPER.format(width=width, page=text))
  done = subprocess.run(
    [browser, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom',
     '--hide-scrollbars', '--host-resolver-rules=MAP * ~NOTFOUND',
     f'--user-data-dir={tmp_path / "user"}',
     f'--window-size={max(width, 500)},900', path.as_uri()],
    capture_output=True, text=True, timeout=120, check=True,
  )  # fmt: skip
  measured = re.search(r'<title>(\d+) (\d+) (\d+) (\d+)</title>', done.stdout)
  scroll, client, drawings, requests = map(int, measured.groups())
  assert scroll <= client == width
  assert drawings > 20
  assert requests == 0
