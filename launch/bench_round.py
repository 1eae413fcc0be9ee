"""The benchmark of a whole round; see `launch/bench.py`."""

import bench_job
import bench_model
import bench_tools
import bench_trl
import bench_tunix


def run() -> bench_tools.Result:
  """Seconds of a round of GRPO of one policy on one device, in float32.

  A round samples 4 completions of each of 8 prompts of --context tokens, rewards
  every other one, and updates the policy, with and without a KL penalty, for
  which a reference scores the completions. A completion has --new tokens: the
  token that ends one comes once in 4096.

  Where google-tunix or TRL is installed, a step of its GRPO trainer runs in turn
  with ours, with the same tokenizer and a model of the same architecture; TRL
  runs on torch's CPU, and generates with transformers, as is its default.
  """
  # Not before the flags are parsed: a mistake in them is reported at once.
  from mrl_jax.training import loop
  from mrl_jax.training import progress

  bench_model.mesh()
  tunix = bench_tunix.load(bench_model.build())
  repeat, rows = bench_model.REPEAT.value, {}
  steps = bench_tools.WARM_UPS + repeat
  with bench_job.folder() as path:
    for name, kl_weight in (('without KL penalty', 0.0), ('with', 0.04)):
      with bench_job.job(path, kl_weight) as job:
        state = progress.Progress()
        timed = {'ours': lambda job=job, s=state: loop.play_round(job, s)}
        prompts = [prompt.text for prompt in job.inputs.train]
        if tunix:
          timed['tunix'] = tunix.rounds(path, prompts, kl_weight, steps)
        if trl := bench_trl.rounds(path, prompts, kl_weight, steps):
          timed['TRL'] = trl
        best = bench_tools.best(timed, repeat)
      rows[name] = bench_tools.beside(best.pop('ours'), best)
  return bench_tools.Result(bench_tools.machine(), rows)
