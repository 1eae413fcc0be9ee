"""The benchmark of the update; see `launch/bench.py`."""

import bench_job
import bench_model
import bench_tools
import bench_tunix


def run() -> bench_tools.Result:
  """Seconds of an update by GRPO with AdamW on one device, in float32.

  The update is of 32 rows, each a prompt of --context tokens and a completion: of
  --new tokens, or of lengths that are geometric with the mean --mean, up to
  --new. Ours includes packing on the host.

  Where google-tunix is installed, the training step of its GRPO runs in turn with
  ours. It pads each row to --new tokens, as its GRPO does by default.
  """
  # Not before the flags are parsed: a mistake in them is reported at once.
  import jax
  import numpy as np

  from mrl_jax.sharing import rows as rows_lib

  bench_model.mesh()
  peer = bench_tunix.load(bench_model.build())
  rng, new = np.random.default_rng(0), bench_model.NEW.value
  count = bench_job.PROMPTS * bench_job.SAMPLES
  table = {}
  with bench_job.folder() as path, bench_job.job(path, kl_weight=0.0) as job:
    worker, prompts = job.workers[bench_job.POLICY], next(job.batches)
    prompt_ids = [worker.policy.prompt_ids(prompt) for prompt in prompts]

    def measured(lengths):
      rows = [
        rows_lib.Row(
          prompt=i // bench_job.SAMPLES,
          ids=rng.integers(1, bench_model.VOCAB, length).astype(np.int32),
          old_logp=np.full(length, -np.log(bench_model.VOCAB), np.float32),
          advantage=(-1.0) ** i,
          chunk=np.arange(length, dtype=np.int32),
          mask=np.ones(length, bool),
        )
        for i, length in enumerate(lengths)
      ]
      batch = rows_lib.Batch(own=rows, order=range(len(prompts)))

      def ours():
        worker.update(worker.pack(prompts, batch))
        jax.block_until_ready(worker.state)

      timed = {'ours': ours}
      if peer:
        timed['tunix'] = peer.update(prompt_ids, rows, new)
      best = bench_tools.best(timed, bench_model.REPEAT.value)
      tokens = sum(lengths) + sum(len(prompt_ids[row.prompt]) for row in rows)
      about = {'tokens': tokens, 'tokens/s': tokens / best['ours']}
      return about | bench_tools.beside(best.pop('ours'), best)

    uneven = rng.geometric(1 / bench_model.MEAN.value, count)
    table[f'{count} rows, even'] = measured([new] * count)
    table[f'{count} rows, uneven'] = measured(np.minimum(uneven, new).tolist())
  return bench_tools.Result(bench_tools.machine(), table)
