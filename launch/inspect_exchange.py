"""Shows the exchange of a run: who gave what to whom, and what THL refused.

python launch/inspect_exchange.py runs/mine --rounds=20 --show=4

Takes a work dir, or a folder of journals such as its see/, of a run that is
finished or not. The THL residual is computed anew from the journals.
"""

from collections.abc import Sequence
import json
import sys

from absl import app
from absl import flags
from rich import console as console_lib

from mrl_jax import bucket
from mrl_jax import checks
from mrl_jax import files
from mrl_jax import workdir
from mrl_jax.analysis import exchange as exchange_lib
from mrl_jax.analysis import exchange_report
from mrl_jax.training import display

_ROUNDS = flags.DEFINE_integer(
  'rounds', 10, 'Number of newest rounds whose rollouts THL transfers.', 1
)
_ROUND = flags.DEFINE_integer('round', None, 'One such round instead.', 0)
_SHOW = flags.DEFINE_integer('show', 2, 'Number of rollouts to show.', 0)
_POLICY = flags.DEFINE_string('policy', None, 'Show rollouts of this policy.')
_PROMPT = flags.DEFINE_string('prompt', None, 'Show rollouts of this prompt.')
_JSON = flags.DEFINE_string('json', None, 'A file to write all numbers to.')


def show(folder: str, console: console_lib.Console) -> None:
  """Prints the exchange of a run, and writes the JSON if it is asked for."""
  exchange = exchange_lib.read(folder, _ROUNDS.value, _ROUND.value)
  residuals, offers = exchange_lib.transfer_all(exchange)
  chosen = choose(offers, _POLICY.value, _PROMPT.value)[: _SHOW.value]
  exchange_report.show(exchange, residuals, chosen, console)
  if _JSON.value:
    values = exchange_report.values(exchange, residuals)
    files.write(_JSON.value, json.dumps(values, indent=1))


def choose(
  offers: Sequence[exchange_lib.Offer], policy: str | None, prompt: str | None
) -> Sequence[exchange_lib.Offer]:
  """Selects the rollouts of a policy and of a prompt, if they are given."""
  chosen = [
    offer
    for offer in offers
    if policy in (None, offer.sender)
    and prompt in (None, offer.rollout.header.prompt)
  ]
  if offers and not chosen:
    header = offers[0].rollout.header
    raise checks.InputError(
      'none of the rollouts is of that policy and prompt; there is, for '
      f'example, --policy={offers[0].sender} --prompt={header.prompt}'
    )
  return chosen


def main(argv):
  if len(argv) != 2:
    sys.exit('name one folder: the work dir of a run, or its see/')
  # A terminal that cannot print ␣ shows its number.
  sys.stdout.reconfigure(errors='backslashreplace')
  console = console_lib.Console(markup=False, emoji=False, highlight=False)
  try:
    home = bucket.WorkDir(argv[1], inner=[workdir.JOURNALS])
    show(home.folder, console)
  except (checks.InputError, OSError) as error:
    sys.exit(display.printable(f'{error}'))


if __name__ == '__main__':
  app.run(main)
