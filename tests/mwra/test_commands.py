"""The commands for Cloud TPU, as a shell reads them."""

import contextlib
import os
import re
import shlex
import subprocess

import grpc
import pytest

from mrl_jax import checks
from mrl_jax.mwra import cloud as cloud_lib
from mrl_jax.mwra import commands
from tests import examples
from tests import exchanges
from tests import rpcs

SLICES = ['llama=v5e:4x4@us-west4-a', 'gemma=v6e:2x4@us-east5-b']


def steps(config=None, given=None, slices=SLICES, **changes):
  """The steps, by the first word of their title."""
  place = cloud_lib.Cloud(
    project='mine',
    folder='gs://bucket/pair',
    slices=cloud_lib.parse_slices(slices),
    **changes,
  )
  config = config or examples.run_config()
  found = commands.steps(config, 'configs/xgrpo.py', given or {}, place)
  return {title.split()[0].strip('.,'): lines for title, lines in found}


def words(line):
  return shlex.split(line, comments=False)


def remote(line):
  """The words of the command that a line gives to workers."""
  (command,) = (w for w in words(line) if w.startswith('--command='))
  return shlex.split(command.removeprefix('--command='))


def test_the_lines_that_make_and_start_slices_are_those_made_by_hand():
  found = steps(given={'train.rounds': 7}, spot=True)
  assert found['Ask'][0] == (
    'gcloud compute tpus queued-resources create pair-gemma '
    '--node-id=pair-gemma --accelerator-type=v6e-8 '
    '--runtime-version=v2-alpha-tpuv6e --tags=pair '
    '--scopes=https://www.googleapis.com/auth/cloud-platform --spot '
    '--project=mine --zone=us-east5-b'
  )
  assert found['Start'][1] == (
    "gcloud compute tpus tpu-vm ssh pair-llama --worker=all --command='cd "
    'mrl_jax && { nohup bash launch/keep_running.sh .venv/bin/python '
    'launch/tpu_pod.py --config=configs/xgrpo.py --config.train.rounds=7 '
    '--config.cluster.coordinator=auto --config.see.listen=0.0.0.0:9400 '
    '--config.see.tls.ca=tls/_ca.pem --config.see.tls.cert=tls/llama.pem '
    '--config.see.tls.key=tls/llama.key '
    '--config.policies.gemma.address=pair-gemma:9400 '
    "--workdir=gs://bucket/pair/llama >> run.log 2>&1 < /dev/null & }' "
    '--project=mine --zone=us-west4-a < /dev/null'
  )
  assert "uv pip install -e '.[tpu,math,gcs]'" in found['Install'][0]
  assert '--spot' not in steps()['Ask'][0]


def test_every_line_is_whole_for_a_shell_and_bash_takes_the_script():
  found = steps(given={'sample.stop': ('\n"', "'$HOME`")})
  for lines in found.values():
    for line in lines:
      assert words(line)
      if '--command' in line:
        assert remote(line)
  text = commands.script([commands.Step(*pair) for pair in found.items()])
  subprocess.run(['bash', '-n'], input=text, text=True, check=True)


def test_each_command_about_a_slice_has_its_name_project_and_zone():
  zones = {'pair-llama': 'us-west4-a', 'pair-gemma': 'us-east5-b'}
  counts = dict.fromkeys(zones, 0)
  for lines in steps().values():
    for line in lines:
      for name, zone in zones.items():
        if re.search(rf'(ssh|describe|create|delete) {name} ', line) or (
          f' {name}:' in line
        ):
          assert f'--zone={zone}' in line
          assert '--project=mine' in line
          counts[name] += 1
  # Create, install, scp, describe, hosts, start, log, stop, delete.
  assert counts == {'pair-llama': 9, 'pair-gemma': 9}


def test_start_repeats_what_the_user_gave_to_the_letter():
  given = {'sample.stop': ('\n"', "'$HOME`"), 'data.source': 'arithmetic'}
  line = steps(given=given)['Start'][1]
  assert f'--config.sample.stop={given["sample.stop"]}' in remote(line)
  assert '--config.data.source=arithmetic' in remote(line)


def test_files_of_this_machine_go_through_the_bucket(tmp_path):
  train, heldout = tmp_path / 'a train.jsonl', tmp_path / 'b'
  model = tmp_path / 'model'
  train.touch()
  heldout.touch()
  model.mkdir()
  config = examples.run_config(
    **{
      'data.source': 'jsonl',
      'data.jsonl.train': os.fspath(train),
      'data.jsonl.heldout': os.fspath(heldout),
      'policies.llama.path': os.fspath(model),
      'policies.gemma.path': 'org/not-a-folder',
    }
  )
  given = {'data.jsonl.train': os.fspath(train), 'train.rounds': 3}
  found = steps(config, given)
  inputs = 'gs://bucket/pair/_inputs'
  assert found['Code'][1:] == [
    f'gcloud storage cp {heldout} {inputs}/data.jsonl.heldout',
    f"gcloud storage cp '{train}' {inputs}/data.jsonl.train",
    'gcloud storage rsync --recursive --no-ignore-symlinks '
    f'{model} {inputs}/policies.llama.path',
  ]
  start = ' '.join(remote(found['Start'][1]))
  assert '--config.data.jsonl.train=inputs/data.jsonl.train' in start
  assert '--config.policies.llama.path=inputs/policies.llama.path' in start
  assert os.fspath(tmp_path) not in start

  config.data.jsonl.heldout = os.fspath(tmp_path / 'nowhere')
  with pytest.raises(checks.InputError, match=r'jsonl\.heldout .*no such file'):
    steps(config)


def test_names_of_peers_are_written_where_their_addresses_are_known(tmp_path):
  """Run by bash, with commands that only say what they were given."""
  hosts = tmp_path / 'hosts'
  own = '127.0.0.1 localhost\n10.1.1.1 pair-of-mine\n'
  hosts.write_text(f'{own}10.9.9.9 pair-gemma # see\n')
  script = f"""
    gcloud() {{
      case "$*" in
        *describe*llama*) echo 10.0.0.1;;
        *describe*gemma*) echo 10.0.0.2;;
        *ssh*pair-llama*)
          command=${{@: -1}}
          command=${{command#--command=}}
          command=${{command//sudo/}}
          bash -c "${{command//'/etc/hosts'/{hosts}}}";;
      esac
    }}
  """
  lines = steps()['Tell']
  subprocess.run(['bash', '-c', '\n'.join([script, *lines])], check=True)
  assert hosts.read_text() == f'{own}10.0.0.2 pair-gemma # see\n'


def test_a_policy_alone_needs_no_network():
  config = examples.run_config()
  config.policies = {'llama': config.policies.llama}
  found = steps(config, slices=SLICES[:1])
  assert found['Certificates'] == found['Tell'] == []
  assert not any('scp' in line for line in found['Install'])
  start = ' '.join(remote(found['Start'][0]))
  assert 'see.' not in start
  assert 'cluster.coordinator=auto' in start
  text = commands.script([commands.Step(*pair) for pair in found.items()])
  numbers = [int(n) for n in re.findall(r'^# (\d+)\.', text, re.MULTILINE)]
  assert numbers == [*range(1, len(numbers) + 1)]


def test_certificates_speak_for_their_policies_only(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  config = examples.run_config()
  names = ['a', 'b', 'qwen2_math']
  config.policies = dict.fromkeys(names, config.policies.llama)
  slices = [f'{name}=v6e:2x4@us-east5-b' for name in names]
  for line in steps(config, slices=slices)['Certificates']:
    subprocess.run(['bash', '-c', line], check=True, capture_output=True)
  folder = 'runs/pair/_tls'
  tls = {
    name: {
      'ca': f'{folder}/_ca.pem',
      'cert': f'{folder}/{name}.pem',
      'key': f'{folder}/{name}.key',
    }
    for name in names
  }
  for name in ('_ca', *names):
    assert os.stat(f'{folder}/{name}.key').st_mode & 0o077 == 0

  with contextlib.ExitStack() as stack:
    receiver = rpcs.Receiver(stack, tmp_path / 'b', tls=tls['b'])
    outlet = rpcs.sender(stack, receiver.address, tls=tls['a'])
    outlet.send(0, exchanges.rollouts())
    rpcs.wait_until_settled(outlet)
    assert rpcs.fates(outlet) == {'published': 1, 'acknowledged': 1}
    # The sender of the message is a.
    stranger = rpcs.credentials(tls['qwen2_math'])
    code, details = rpcs.call(
      receiver.address, rpcs.message(), stranger, target='b'
    )
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith('certificate')

    other = rpcs.Receiver(stack, tmp_path / 'q', tls=tls['qwen2_math'])
    own = rpcs.credentials(tls['a'])
    for target, expected in (
      ('qwen2_math', grpc.StatusCode.OK),
      ('b', grpc.StatusCode.UNAVAILABLE),
    ):
      code, _ = rpcs.call(other.address, rpcs.message(), own, target=target)
      assert code == expected
