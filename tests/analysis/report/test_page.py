"""The report tells what a run did, and all text in it is inert."""

import html as html_lib
import json
import os
import re
import shutil
import subprocess

import pytest

from mrl_jax import checks
from mrl_jax import workdir
from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.report import drawing
from mrl_jax.analysis.report import page
from tests.analysis import workdirs
from tests.analysis.report import pages

HOSTILE = '</pre></style></svg><script>alert(1)</script>\u202e\x00"\'&{{ 7*7 }}'


@pytest.fixture
def without_drawings(monkeypatch):
  """Pages whose text matters are made without drawing their charts."""
  monkeypatch.setattr(drawing, 'svg', lambda chart, name: '<svg></svg>')


def render(folder):
  return pages.check(page.render(run_lib.read(folder))).text


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The page of a finished run."""
  folder = tmp_path_factory.mktemp('runs') / 'mine'
  path = page.write(workdirs.write(folder))
  assert path == os.path.join(folder, 'report.html')
  with open(path, encoding='utf-8') as f:
    return f.read()


def test_it_tells_what_ran_and_the_results(whole):
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
    'KL to the initial policy : not drawn, because method.kl_weight is 0.',
    'gemma, by llama 50.0%',
    'Refused : nothing.',
    'llama → gemma, rollout 40 records, 8 KiB 28 used 8 stale 4 waiting',
    'refused 8 (25%) – as too_long 8, 120 B',
    'tokens of the receiver 160 (+100.0%)',
    'segmentation error 25.0%',
    '1:1 chunks 33.3% 1:n chunks 66.7%',
    'start 10 s, 38.5% sampling 4 s, 15.4% updates 10 s, 38.5%',
    'gemma: best, after 4 rounds prompt sort 3 1 completion = 1 3',
    'correct , reward 1, 6 tokens, -0.250 nats a token, with end-of-sequence',
    'wrong , reward 1, 6 tokens, -0.250 nats a token, with a stop string',
    'All 10 keys',
    'warm_start_families ["formula/add", "words/add"]',
    'Accuracy in training',  # It differs from the reward.
  ):
    assert part in text
  assert 'Missing or damaged' not in text


def test_accuracy_is_not_drawn_if_it_is_the_reward():
  rows = {'gemma': [workdir.RoundMetrics(0, 'gemma', reward=1, accuracy=1)]}
  curves = page.learning(run_lib.Run(folder='', rows=rows))
  assert 'accuracy' not in [curve.field for curve in curves]


def test_links_lead_to_sections(whole):
  found = pages.Page(whole)
  links = {v[1:] for k, v in found.attributes if k == 'href'}
  assert {'result', 'thl', 'config'} < links <= {*found.ids}


def hostile(value):
  """Replaces all texts, but not the keys, which are fields."""
  if isinstance(value, str):
    return HOSTILE
  if isinstance(value, list):
    return [hostile(one) for one in value]
  if isinstance(value, dict):
    return {key: hostile(one) for key, one in value.items()}
  return value


def test_text_from_anywhere_is_inert(tmp_path):
  names = (f'a{HOSTILE}', f'b{HOSTILE}')
  workdirs.write(
    tmp_path, policies=names, refused={HOSTILE: 3}, config={HOSTILE: HOSTILE},
    method={'capability': {HOSTILE: 1.0}},
  )  # fmt: skip
  path = tmp_path / 'evaluations.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  accuracy = {'accuracy': {'all': 0.5, HOSTILE: 0.5}}
  rows = [{**hostile(r), 'policy': r['policy'], **accuracy} for r in rows]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  path = tmp_path / 'plan.json'
  plan = hostile(json.loads(path.read_text()))
  path.write_text(json.dumps({**plan, 'elsewhere': {f'c{HOSTILE}': HOSTILE}}))
  workdirs.change(tmp_path, 'config.json', '"prp"', json.dumps(HOSTILE))
  with open(tmp_path / 'metrics.jsonl', 'a', encoding='utf-8') as f:
    f.write(json.dumps({'round': 0, 'policy': 'a', 'reward': HOSTILE}) + '\n')
  text = page.render(run_lib.read(tmp_path))
  assert not {'\u202e', '\x00'} & {*text}
  inert = (
    '</pre></style></svg><script>alert(1)</script>\\u202e\\x00"\'&{{ 7*7 }}'
  )
  assert pages.check(text).text.count(inert) > 30


def test_completions_keep_their_lines_and_long_ones_are_cut():
  lines, more = page.clip('a\r\n\tb' + 'c' * 5_000)
  assert lines[0] == 'a\r'
  assert (sum(map(len, lines)) + 1, more) == (2_000, 3_005)


@pytest.mark.usefixtures('without_drawings')
def test_a_run_that_has_not_finished_has_a_page(tmp_path):
  text = render(workdirs.write(tmp_path / 'new', rounds=0))
  assert 'before its first round of 4' in text
  assert '25.0 ±2.0 before' in text
  assert text.count('The run has not finished a round yet.') == 5
  assert 'Missing or damaged' not in text
  workdirs.write(tmp_path / 'two', rounds=2, refused={'incompatible': 7})
  text = render(tmp_path / 'two')
  assert 'after 2 of 4 rounds: still running, or stopped' in text
  assert 'Sums over the rounds in metrics.jsonl' in text
  assert 'training rows of gemma: incompatible 14' in text
  assert 'Missing or damaged' not in text


@pytest.mark.usefixtures('without_drawings')
def test_what_is_missing_or_damaged_is_named_at_the_top(tmp_path):
  workdirs.write(tmp_path)
  for name in ('plan.json', 'config.json', 'summary.json'):
    (tmp_path / name).write_text('{')
  (tmp_path / 'evaluations.jsonl').unlink()
  rows = (tmp_path / 'metrics.jsonl').read_text()
  (tmp_path / 'metrics.jsonl').write_text('?\n' * 50 + rows[:-9])
  top, _, rest = render(tmp_path).partition('Result Plan')
  for part in (
    'Unknown method : after 4 rounds',
    'plan.json left out: it is not JSON',
    'config.json left out: it is not JSON',
    'metrics.jsonl, line 1 left out: it is not JSON: Expecting value at',
    '15 more',
  ):
    assert part in top
  assert 'Unknown: there is no readable plan.json.' in rest
  assert 'Unknown: there is no readable config.json.' in rest


def test_a_run_with_a_config_alone_has_a_page(tmp_path):
  workdir.write(tmp_path, workdir.SETUP, workdir.Setup())
  text = render(tmp_path)
  assert 'metrics.jsonl is missing' in text
  assert 'before its first round' in text


@pytest.mark.usefixtures('without_drawings')
def test_a_method_without_exchange_has_reasons_for_missing_charts(tmp_path):
  text = render(
    workdirs.write(
      tmp_path, policies=('llama',), rounds=1, peer=workdir.Ratios(),
      peer_rows=0, rescued_by={}, config={'method.name': 'grpo'},
    )
  )  # fmt: skip
  assert 'No records were exchanged: grpo uses no records of peers' in text
  assert 'THL had nothing to carry' in text
  assert (
    "Peers' tokens clipped; Largest ratio, peers' tokens; Effective sample "
    "size, peers; Log-probability of peers' tokens; Importance ratios, peers' "
    'tokens : not drawn, because no rows of peers were trained on.' in text
  )


def test_numbers_that_are_not_finite_are_not_shown(tmp_path):
  nan, inf = float('nan'), float('inf')
  text = render(
    workdirs.write(
      tmp_path, rounds=2, reward=nan, entropy=inf, grad_norm=1e300,
      rescued_by={'gemma': nan},
      timing=workdir.Timing(seconds=nan, phases={'a': inf}),
    )
  )  # fmt: skip
  assert 'numbers that are not finite' in text
  assert 'not drawn, because metrics.jsonl has no reward.' in text


def test_a_folder_without_a_run_gets_no_page(tmp_path):
  with pytest.raises(checks.InputError, match='give the work dir of a run'):
    page.write(os.fspath(tmp_path))
  assert os.listdir(tmp_path) == []


def test_configs_are_grouped():
  config = {'a.b.c': 1, 'seed': 2, 'policies.x.y.z': 3, 'policies.x.w': 4}
  assert page.grouped(config) == {
    'a': {'b.c': 1}, 'policies.x': {'w': 4, 'y.z': 3}, '': {'seed': 2},
  }  # fmt: skip


def test_parts_of_a_bar_keep_the_colours_of_their_places():
  parts = page.stack({'new': 1, 'b': 2, 'c': 0, 'a': 1}, ('a', 'b', 'c'))
  shares = [(name, n, share) for name, n, share, _ in parts]
  assert shares == [('a', 1, 0.25), ('b', 2, 0.5), ('new', 1, 0.25)]
  expected = [page.style.AREAS[i] for i in (0, 1, 3)]
  assert [drawn.color for *_, drawn in parts] == expected


def test_results_are_of_the_first_evaluation_and_of_the_last():
  def results(*evaluations):
    return page.results(run_lib.Run(folder='', evaluations={'a': evaluations}))[
      'a'
    ]

  first, _, last = (
    workdirs.evaluation(n, 'a', n / 8, error={'all': n / 64}) for n in (2, 4, 6)
  )
  assert results(first, first, last) == [
    ('all', 0.25, 2 / 64, 0.75, 6 / 64), ('words/add', 0.125, None, 0.375, None)
  ]  # fmt: skip
  overall, _ = results(first)
  assert overall == ('all', 0.25, 2 / 64, None, None)


def test_a_mean_is_known_if_all_values_are():
  values = {
    'a': [page.Accuracy('all', 0.2, 0.02, 0.4, 0.04)],
    'b': [page.Accuracy('all', 0.4, 0.02, None, 0.04)],
  }
  assert page.mean(values) == page.Accuracy(
    'mean', pytest.approx(0.3), 0.02, None, 0.04
  )
  assert page.mean({}) == page.Accuracy('mean', None, None, None, None)


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
    pytest.skip('chromium is not on the PATH')
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
