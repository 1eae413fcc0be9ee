import io

import pytest
from rich import console as console_lib

from mrl_jax import workdir
from mrl_jax.thl import transfer
from mrl_jax.training import display


@pytest.fixture
def shown():
  return console_lib.Console(file=io.StringIO(), width=100)


def policy(**changes):
  fields = {
    'parameters': 12345,
    'vocabulary': 384,
    'devices': [0],
    'mesh': {'data': 1, 'fsdp': 1, 'tensor': 1},
    'decode_mesh': {'data': 1, 'fsdp': 1, 'tensor': 1},
    'micro_rows': 512,
    'sample_batch': 32,
    'remat': 'dots',
    'reason': 'on 2 a round takes [long]',
    'memory_bytes': 1.5 * 2**20,
    'load': 1.0,
  }
  return workdir.PolicyPlan(**{**fields, **changes})


def test_the_plan_names_devices_meshes_and_skipped_prompts(shown):
  sharded = policy(
    adapters=77,
    devices=[4, 5, 6, 7],
    mesh={'data': 1, 'fsdp': 2, 'tensor': 2},
    load=0.5,
  )
  plan = workdir.Plan(
    devices='8 x cpu',
    policies={'a': policy(devices=[0, 2, 3]), 'b': sharded},
    elsewhere={'c': 'from runs/[old]'},
    prompts_skipped=3,
    answers_faulty=2,
  )
  display.show_start(shown, 'runs/[/mine]', plan)
  text = shown.file.getvalue()
  for part in (
    'runs/[/mine]', '8 x cpu', '12,345', '12,345 + 77', '0, 2-3', '4-7',
    'a: on 2 a round takes [long]', 'dots',
    'one device', 'fsdp 2, tensor 2', '1.5 MiB', '50%', '3 prompts are too',
    'c is not trained here: from runs/[old]', '2 gold answers could never',
  ):  # fmt: skip
    assert part in text


def accuracy(before, after):
  return workdir.PolicySummary(
    workdir.BeforeAfter(before, after), workdir.BeforeAfter({}, {})
  )


def test_the_end_shows_mean_accuracy_and_the_fate_of_records(shown):
  rollouts = {
    'published': 1200,
    'bytes': 3 * 2**20,
    'used': 1000,
    'refused': 200,
  }
  summary = workdir.Summary(
    method='prp',
    rounds=3,
    timing=workdir.RunTiming(seconds=2.0, waited={'a->b': 1.25}),
    policies={'a': accuracy(0.25, 0.5), 'b': accuracy(0.5, 0.75)},
    exchange={'a->b': {'rollout': rollouts}},
    sent={
      'b->c': {'group_stats': {'published': 7, 'bytes': 0, 'acknowledged': 7}}
    },
    refusals={'a->b': {'tokenizer': 200}},
    residuals={
      'a->b': transfer.Residual(
        rollouts=7,
        refused={'too_long': 2},
        sender_tokens=10,
        receiver_tokens=20,
        chunks={'1:1': 3, '1:n': 1, 'n:1': 0, 'n:m': 0},
      ),
      'b->a': transfer.Residual(rollouts=5),
    },
  )
  display.show_end(shown, summary, 'runs/mine')
  text = shown.file.getvalue()
  for part in ('37.5', '62.5', '+25.0', '1,200', '3.0', '1,000 used',
               '200 tokenizer', '1.2 s', 'b->c', '7 acknowledged', '2 too_long',
               '75% 1:1, 25% 1:n', '80.0%', 'texts only', 'runs/mine',
               '3 rounds of prp; 2 s'):  # fmt: skip
    assert part in text


def test_progress_is_lines_without_a_terminal(shown):
  with display.live(shown, 'round', {'a': 25}, done=5) as advance:
    for _ in range(20):
      advance('a', 'reward 0.50')
  assert shown.file.getvalue().splitlines() == [
    'round a 10/25 reward 0.50',
    'round a 20/25 reward 0.50',
    'round a 25/25 reward 0.50',
  ]


def test_progress_is_bars_on_a_terminal():
  shown = console_lib.Console(
    file=io.StringIO(), width=100, force_terminal=True
  )
  with display.live(shown, 'round', {'a': 2, 'b': 2}) as advance:
    advance('a', 'reward 0.50')
  assert 'round a' in shown.file.getvalue()
  assert 'reward 0.50' in shown.file.getvalue()


def test_the_note_of_a_round():
  row = workdir.RoundMetrics(
    round=0,
    policy='a',
    reward=0.512,
    peer_records=32,
    timing=workdir.Timing(tokens_per_second=12345.6),
  )
  assert display.note(row) == 'reward 0.51  12,346 tok/s  32 from peers'
