import contextlib
import importlib.util
import os
import pathlib
import socket
import subprocess

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import bucket
from mrl_jax import checks
from mrl_jax.analysis import run as run_lib
from mrl_jax.see import spool as spool_lib
from mrl_jax.training import export
from mrl_jax.training import job as job_lib
from mrl_jax.training import loop
from mrl_jax.update import checkpoint
from tests import runs

HOME = 'gs://bucket/runs'


@pytest.fixture(scope='module')
def server():
  """An emulated bucket, which fsspec and tensorstore find by the environment."""
  from gcp_storage_emulator import exceptions
  from gcp_storage_emulator.handlers import objects

  download = objects.download

  def with_generation(request, response, storage, *arguments, **options):
    """The emulator leaves out a header that tensorstore asks for."""
    place = request.params['bucket_name'], request.params['object_id']
    with contextlib.suppress(exceptions.NotFound):
      found = storage.get_file_obj(*place)
      response['x-goog-generation'] = found['generation']
    download(request, response, storage, *arguments, **options)

  with socket.create_server(('localhost', 0)) as free:
    port = free.getsockname()[1]
  address = f'http://localhost:{port}'
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(objects, 'download', with_generation)
    from gcp_storage_emulator import server as emulator

    patch.setenv('STORAGE_EMULATOR_HOST', address)
    patch.setenv('TENSORSTORE_GCS_HTTP_URL', address)
    patch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'none')
    started = emulator.create_server(
      'localhost', port, in_memory=True, default_bucket='bucket'
    )
    started.start()
    yield address
    started.stop()


in_bucket = pytest.mark.skipif(
  not importlib.util.find_spec('gcp_storage_emulator'),
  reason="pip install -e '.[parity]'",
)


def test_other_schemes_are_not_taken_for_folders():
  with pytest.raises(
    checks.InputError, match='s3://x/y is neither a folder nor'
  ):
    bucket.WorkDir('s3://x/y')


def test_copies_of_processes_that_are_gone_are_removed(tmp_path, monkeypatch):
  monkeypatch.setattr(bucket.tempfile, 'gettempdir', lambda: str(tmp_path))
  gone = subprocess.Popen(['true'])
  gone.wait()
  names = (
    *(f'mrl_jax-{gone.pid}-a', f'mrl_jax-{os.getpid()}-b'),
    *('mrl_jax-c', 'other'),
  )
  for name in names:
    (tmp_path / name).mkdir()
  bucket._remove_copies_of_the_dead()
  assert {*os.listdir(tmp_path)} == {*names[1:]}


def test_a_folder_is_its_own_copy(tmp_path):
  home = bucket.WorkDir(os.fspath(tmp_path))
  home.own()
  home.push(wait=True)
  assert home.folder == home.given == os.fspath(tmp_path)
  assert home.path('checkpoints') == os.fspath(tmp_path / 'checkpoints')
  assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@in_bucket
def test_files_that_changed_are_uploaded_and_fetched(server):
  home = bucket.WorkDir(f'{HOME}/files')
  home.own()
  os.makedirs(os.path.join(home.folder, 'see', 'llama'))
  for name, text in (('a', '1'), ('see/llama/b', '2'), ('lock', 'mine')):
    with open(os.path.join(home.folder, name), 'w', encoding='utf-8') as f:
      f.write(text)
  home.push(wait=True)
  with open(os.path.join(home.folder, 'a'), 'a', encoding='utf-8') as f:
    f.write('1')
  home.push()
  home.push(wait=True)
  again = bucket.WorkDir(f'{HOME}/files')
  assert os.listdir(again.folder) == ['a']
  whole = bucket.WorkDir(f'{HOME}/files', inner=['see'])
  found = {
    name: pathlib.Path(whole.folder, name).read_text(encoding='utf-8')
    for name in ('a', 'see/llama/b')
  }
  assert found == {'a': '11', 'see/llama/b': '2'}
  assert sorted(os.listdir(whole.folder)) == ['a', 'see']


@pytest.mark.slow
@in_bucket
def test_the_process_that_comes_last_owns_a_work_dir(server):
  first = bucket.WorkDir(f'{HOME}/owned')
  first.own()
  first.push(wait=True)
  second = bucket.WorkDir(f'{HOME}/owned')
  second.own()
  second.push(wait=True)
  with pytest.raises(checks.InputError, match='was taken over by process'):
    first.push(wait=True)


@pytest.mark.slow
@in_bucket
def test_received_messages_outlive_the_disk(server):
  folder = f'{HOME}/received'
  spool = spool_lib.Spool(folder, 20_000)
  names = [spool.add('a', round, b'message') for round in (0, 1)]
  with pytest.raises(spool_lib.Full):
    spool.add('a', 2, bytes(20_000))
  again = spool_lib.Spool(folder, 20_000)
  assert [*again.left(0)] == [(names[0], b'message')]
  again.forget(1)
  assert [*spool_lib.Spool(folder, 20_000).left(9)] == [(names[1], b'message')]


@pytest.mark.slow
@in_bucket
def test_parameters_that_a_kill_cut_off_are_written_again(server):
  path, params = f'{HOME}/params', {'x': jnp.arange(3.0)}
  checkpoint.save_params(path, params)
  epath.Path(path, 'commit_success.txt').unlink()
  assert checkpoint.restore_params(path, params) is None
  checkpoint.save_params(path, {'x': params['x'] + 1})
  restored = checkpoint.restore_params(path, params)
  np.testing.assert_array_equal(restored['x'], params['x'] + 1)


@pytest.mark.slow
@in_bucket
def test_a_run_resumes_from_a_bucket_on_another_host(server, tmp_path):
  config = runs.config()
  on_disk = runs.run('beside-a-bucket', config)
  given = f'{HOME}/resumed'
  job = job_lib.build(config, bucket.WorkDir(given))
  with pytest.raises(SystemExit):
    loop.run(job, runs.console(), runs.Asked())
  assert checkpoint.newest(f'{given}/checkpoints') == 1
  # With another copy, as on another disk.
  home = bucket.WorkDir(given)
  summary = loop.run(job_lib.build(config, home), runs.console())
  home.push(wait=True)
  fetched = bucket.WorkDir(given, inner=['see'])
  copy = fetched.folder
  assert runs.rows(copy) == runs.rows(on_disk.workdir)
  assert run_lib.read(copy).summary.policies == on_disk.summary.policies
  assert summary.exchange == on_disk.summary.exchange
  assert {*os.listdir(f'{copy}/see')} == {*os.listdir(f'{on_disk.workdir}/see')}
  weights = []
  for source, name in ((given, 'bucket'), (on_disk.workdir, 'disk')):
    out = os.fspath(tmp_path / name)
    export.export(source, 'llama', out)
    with open(os.path.join(out, 'model.safetensors'), 'rb') as f:
      weights.append(np.frombuffer(f.read(), np.uint8))
  np.testing.assert_array_equal(*weights)
