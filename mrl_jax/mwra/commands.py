"""The commands that train policies on Cloud TPU, each on a slice of its own.

  place = cloud.Cloud(project='mine', folder='gs://bucket/pair', slices=slices)
  steps = commands.steps(config, 'configs/xgrpo.py', given, place)
  print(commands.script(steps))

They are text for a person, or a shell, at home. A slice is a queued resource,
named RUN-POLICY. Its hosts are a cluster, whose worker 0 reaches those of the
other slices by their names, over gRPC with mutual TLS.
"""

from collections.abc import Mapping, Sequence
import os
import re
import shlex
from typing import NamedTuple

import ml_collections

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax.mwra import cloud as cloud_lib

CODE = 'configs', 'launch', 'mrl_jax'  # Folders that workers get.
PORT = 9400  # Where worker 0 of every slice listens.
# Keys whose values may be files or folders of this machine.
_FILES = re.compile(
  r'data\.jsonl\.(train|heldout)|policies\.[^.]+\.(tokenizer\.)?path'
)
_SCOPE = 'https://www.googleapis.com/auth/cloud-platform'
_HOME = 'mrl_jax'  # Folder of the code in the home directory of a worker.
_SSH_KEY = '~/.ssh/google_compute_engine'  # As gcloud has it.
_NO_INPUT = ' < /dev/null'  # Or ssh takes the lines that are pasted after it.
# Hugging Face's cache has links to files.
_COPY_FOLDER = ['rsync', '--recursive', '--no-ignore-symlinks']


class Step(NamedTuple):
  """Lines of a shell, and what they do."""

  title: str
  lines: list[str]


def steps(
  config: ml_collections.ConfigDict,
  config_file: str,
  given: Mapping[str, object],
  cloud: cloud_lib.Cloud,
) -> list[Step]:
  """All commands, from an empty project to a deleted slice.

  Args:
    config: the config, of all policies.
    config_file: its file, as --config names it, in the folder of the code.
    given: the keys that the user set beside it, with their values.
    cloud: where the run is to be.
  """
  cloud_lib.check(cloud, config, given)
  policies = list(config.policies)
  linked = len(policies) > 1
  files = _files(config)

  def each(line):
    return [line(cloud, policy) for policy in policies]

  return [
    Step('Once: bucket, access, firewall and a key for ssh', _project(cloud)),
    Step(
      'Certificates, at home. Made again, they go to all slices again',
      _certificates(cloud, policies),
    ),
    Step('Code and files to the bucket', _upload(cloud, files)),
    Step(
      'Ask for the slices. Go on when the list says ACTIVE of all',
      [*each(_create), *_list(cloud)],
    ),
    Step('Install', each(_install) + (each(_copy_keys) if linked else [])),
    Step('Tell each slice where its peers are', _names(cloud, policies)),
    Step(
      'Start. The same commands resume',
      [_start(cloud, p, config_file, given, files, policies) for p in policies],
    ),
    Step('Watch', [*each(_log), *each(_metrics)]),
    Step('Stop, with a checkpoint', each(_stop)),
    Step('The report, at home', _report(cloud, policies)),
    Step(
      'Delete the slices. After a preemption, delete that slice only, and '
      'repeat for it from "Ask" to "Install", then "Tell" of all, and "Start"',
      each(_delete),
    ),
    Step('Clean up what else the run had, but the bucket', _delete_rest(cloud)),
  ]


def script(steps: Sequence[Step], notes: Sequence[str] = ()) -> str:
  """The commands as text, with numbered titles as comments."""
  parts = ['\n'.join(f'# {note}' for note in notes)]
  for i, (title, lines) in enumerate((s for s in steps if s.lines), 1):
    parts.append('\n'.join([f'# {i}. {title}.', *lines]))
  return '\n\n'.join(filter(None, parts)) + '\n'


def _files(config) -> dict[str, str]:
  """The files and folders of this machine that workers need, by key."""
  for name, path in config.data.jsonl.items():
    checks.require(
      config.data.source != 'jsonl'
      or name not in ('train', 'heldout')
      or os.path.isfile(path),
      f'data.jsonl.{name} = {path!r}; there is no such file to copy to slices',
    )
  return {
    key: path
    for key, path in config_lib.flat(config).items()
    if _FILES.fullmatch(key) and path and os.path.exists(path)
  }


def _tpu(cloud, policy, *words, kind='tpu-vm') -> str:
  """A command of gcloud about a policy's slice, whose name is word NAME."""
  names = [cloud.name(policy) if word == 'NAME' else word for word in words]
  place = f'--project={cloud.project}', f'--zone={cloud.slices[policy].zone}'
  words = ['gcloud', 'compute', 'tpus', kind, *names, *place]
  return ' '.join(map(_quoted, words))


def _quoted(word) -> str:
  """A word for a shell, with the quotes that are easiest to read."""
  flag, equals, value = word.partition('=')
  if "'" in value and not re.search(r'["$`!\\]', value):
    return f'{flag}{equals}"{value}"'
  return f'{flag}{equals}{shlex.quote(value)}' if equals else shlex.quote(word)


def _ssh(cloud, policy, command, worker='all') -> str:
  flags = f'--worker={worker}', f'--command={command}'
  return _tpu(cloud, policy, 'ssh', 'NAME', *flags) + _NO_INPUT


def _project(cloud) -> list[str]:
  project, tag = f'--project={cloud.project}', cloud.run
  region = next(iter(cloud.slices.values())).zone.rpartition('-')[0]
  number = (
    f"$(gcloud projects describe {cloud.project} --format='value(projectNumber)'"
    ')'
  )
  lines = [
    'gcloud services enable compute.googleapis.com tpu.googleapis.com '
    f'storage.googleapis.com {project}',
    f'gcloud storage buckets create {cloud.bucket} {project} '
    f'--location={region} --uniform-bucket-level-access',
    # orbax asks for the bucket itself too, which no role for objects allows.
    *(
      f'gcloud storage buckets add-iam-policy-binding {cloud.bucket} '
      f'--role=roles/storage.{role} --member='
      f'serviceAccount:{number}-compute@developer.gserviceaccount.com'
      for role in ('objectAdmin', 'legacyBucketReader')
    ),
    # Without it, the first ssh would ask for a passphrase.
    f"[ -e {_SSH_KEY} ] || ssh-keygen -q -t rsa -N '' -f {_SSH_KEY}",
  ]
  if len(cloud.slices) > 1:
    lines.append(
      f'gcloud compute firewall-rules create {tag}-see {project} '
      f'--allow=tcp:{PORT} --source-tags={tag} --target-tags={tag}'
    )
  return lines


def _keys(cloud) -> str:
  return f'runs/{cloud.run}/_tls'


def _certificates(cloud, policies) -> list[str]:
  """An authority, and for each policy a certificate that speaks for it."""
  if len(policies) == 1:
    return []
  new = '-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'
  ca = f'{_keys(cloud)}/_ca'
  lines = [
    f'mkdir -p -m 700 {_keys(cloud)}',
    f'openssl req -x509 {new} -days 365 -subj /CN={cloud.run} '
    f'-keyout {ca}.key -out {ca}.pem',
  ]
  for policy in policies:
    own = f'{_keys(cloud)}/{policy}'
    lines += [
      f'openssl req {new} -subj /CN={policy} '
      f'-addext subjectAltName=DNS:{policy} -keyout {own}.key -out {own}.csr',
      f'openssl x509 -req -in {own}.csr -CA {ca}.pem -CAkey {ca}.key '
      f'-CAcreateserial -days 365 -copy_extensions copy -out {own}.pem',
    ]
  return lines


def _upload(cloud, files) -> list[str]:
  lines = [
    f'tar --exclude=__pycache__ -czf - {" ".join(CODE)} setup.py | '
    f'gcloud storage cp - {cloud.inputs}/code.tar.gz'
  ]
  for key, path in files.items():
    how = _COPY_FOLDER if os.path.isdir(path) else ['cp']
    target = f'{cloud.inputs}/{key}'
    lines.append(shlex.join(['gcloud', 'storage', *how, path, target]))
  return lines


def _create(cloud, policy) -> str:
  slice_ = cloud.slices[policy]
  return _tpu(
    cloud,
    policy,
    *('create', 'NAME', f'--node-id={cloud.name(policy)}'),
    f'--accelerator-type={slice_.accelerator}',
    f'--runtime-version={slice_.runtime}',
    *(f'--tags={cloud.run}', f'--scopes={_SCOPE}'),
    *(['--spot'] if cloud.spot else []),
    kind='queued-resources',
  )


def _list(cloud) -> list[str]:
  return [
    f'gcloud compute tpus queued-resources list --project={cloud.project} '
    f'--zone={zone}'
    for zone in dict.fromkeys(s.zone for s in cloud.slices.values())
  ]


def _install(cloud, policy) -> str:
  # The images have Python 3.10.
  commands = (
    f'mkdir -p {_HOME}/tls {_HOME}/inputs',
    f'cd {_HOME}',
    f"gcloud storage cp --recursive '{cloud.inputs}/*' inputs/",
    'tar -xzf inputs/code.tar.gz',
    'curl -LsSf https://astral.sh/uv/install.sh | sh',
    '~/.local/bin/uv venv --allow-existing --python=3.12',
    "~/.local/bin/uv pip install -e '.[tpu,math,gcs]'",
  )
  return _ssh(cloud, policy, ' && '.join(commands))


def _copy_keys(cloud, policy) -> str:
  names = '_ca.pem', f'{policy}.pem', f'{policy}.key'
  files = [f'{_keys(cloud)}/{name}' for name in names]
  target = f'{cloud.name(policy)}:{_HOME}/tls/'
  line = _tpu(cloud, policy, 'scp', *files, target, '--worker=0')
  return line + _NO_INPUT


def _names(cloud, policies) -> list[str]:
  """Writes the addresses of peers to /etc/hosts: new slices have new ones.

  A peer that runs finds a new address by itself.
  """
  if len(policies) == 1:
    return []
  address = '--format=value(networkEndpoints[0].ipAddress)'
  lines = [
    f'ip_{policy}=$({_tpu(cloud, policy, "describe", "NAME", address)})'
    for policy in policies
  ]
  for policy in policies:
    commands = ["sudo sed -i '/ # see$/d' /etc/hosts"]
    commands += [
      f"echo '${{ip_{peer}:?}} {cloud.name(peer)} # see' | sudo tee -a /etc/hosts"
      for peer in policies
      if peer != policy
    ]
    # Between double quotes, this shell puts addresses for variables.
    lines.append(
      f'{_tpu(cloud, policy, "ssh", "NAME", "--worker=0")} '
      f'--command="{" && ".join(commands)}"{_NO_INPUT}'
    )
  return lines


def _start(cloud, policy, config_file, given, files, policies) -> str:
  keys = {**given}
  keys |= {key: f'inputs/{key}' for key in files}
  keys['cluster.coordinator'] = 'auto'
  if len(policies) > 1:
    keys |= {
      'see.listen': f'0.0.0.0:{PORT}',
      'see.tls.ca': 'tls/_ca.pem',
      'see.tls.cert': f'tls/{policy}.pem',
      'see.tls.key': f'tls/{policy}.key',
    }
  for peer in policies:
    if peer != policy:
      keys[f'policies.{peer}.address'] = f'{cloud.name(peer)}:{PORT}'
  train = [
    *('bash', 'launch/keep_running.sh', '.venv/bin/python'),
    *('launch/tpu_pod.py', f'--config={config_file}'),
    *(f'--config.{key}={value}' for key, value in keys.items()),
    f'--workdir={cloud.bucket}/{cloud.run}/{policy}',
  ]
  # With the braces, no shell of its own waits for it: ssh would wait for that.
  background = f'nohup {shlex.join(train)} >> run.log 2>&1 < /dev/null &'
  return _ssh(cloud, policy, f'cd {_HOME} && {{ {background} }}')


def _log(cloud, policy) -> str:
  return _ssh(cloud, policy, f'tail -n 20 {_HOME}/run.log', worker='0')


def _metrics(cloud, policy) -> str:
  metrics = f'{cloud.bucket}/{cloud.run}/{policy}/metrics.jsonl'
  return f'gcloud storage cat {metrics} | tail -n 1'


def _stop(cloud, policy) -> str:
  # The brackets keep it from stopping the shell that it is a command of.
  return _ssh(cloud, policy, "pkill -TERM -f '[l]aunch/tpu_pod.py'")


def _report(cloud, policies) -> list[str]:
  home, report = f'runs/{cloud.run}', 'python launch/report.py'
  runs = [f'{cloud.bucket}/{cloud.run}/{policy}' for policy in policies]
  lines = [
    f'mkdir -p {home}',
    *(
      f'{report} {run} && mv report.html {home}/{policy}.html'
      for run, policy in zip(runs, policies, strict=True)
    ),
  ]
  if len(runs) > 1:
    lines.append(f'{report} {" ".join(runs)} --out={home}/comparison.html')
  return lines


def _delete(cloud, policy) -> str:
  flags = 'NAME', '--force', '--quiet'
  return _tpu(cloud, policy, 'delete', *flags, kind='queued-resources')


def _delete_rest(cloud) -> list[str]:
  if len(cloud.slices) == 1:
    return []
  return [
    f'gcloud compute firewall-rules delete {cloud.run}-see '
    f'--project={cloud.project} --quiet',
    f'rm -r {_keys(cloud)}',
  ]
