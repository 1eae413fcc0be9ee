"""TRL, beside whose GRPO a round is measured."""

from collections.abc import Callable, Sequence
import os

import bench_job
import bench_model
import bench_tools


def rounds(
  folder: str, prompts: Sequence[str], kl_weight: float, count: int
) -> Callable[[], None] | None:
  """A step of TRL's GRPO in float32 on the CPU, `count` times.

  The policy is that of a `bench_job.folder`. None if TRL is not installed.
  """
  try:
    import datasets
    import transformers
    import trl
  except ModuleNotFoundError as error:
    print(f"{error}; to compare with TRL: pip install -e '.[bench]'")
    return None
  datasets.disable_progress_bars()
  transformers.utils.logging.disable_progress_bar()
  model = os.path.join(folder, 'model')
  rows = bench_job.PROMPTS * bench_job.SAMPLES
  trainer = trl.GRPOTrainer(
    model=transformers.AutoModelForCausalLM.from_pretrained(
      model, dtype='float32'
    ),
    processing_class=transformers.AutoTokenizer.from_pretrained(model),
    reward_funcs=lambda prompts, completions, **_: [
      float(i % 2) for i in range(len(completions))
    ],
    train_dataset=datasets.Dataset.from_dict({'prompt': list(prompts)}),
    args=trl.GRPOConfig(
      output_dir=os.path.join(folder, f'trl-{kl_weight}'),
      per_device_train_batch_size=rows,
      num_generations=bench_job.SAMPLES,
      max_completion_length=bench_model.NEW.value,
      max_steps=count,
      beta=kl_weight,
      use_cpu=True,
      bf16=False,
      # There is enough memory.
      gradient_checkpointing=False,
      save_strategy='no',
      report_to='none',
      logging_strategy='no',
      disable_tqdm=True,
    ),
  )
  trainer.remove_callback(transformers.PrinterCallback)

  class Pause(transformers.TrainerCallback):
    def __init__(self, pause):
      self._pause = pause

    def on_step_begin(self, args, state, control, **kwargs):
      self._pause()

  def train(pause):
    trainer.add_callback(Pause(pause))
    trainer.train()

  return bench_tools.Steps(train)
