"""Breaks the formulas one by one, and tells which tests notice.

  python tests/mutations.py            # all of them, some minutes
  python tests/mutations.py gspo graft # those of which the name has this

Each edit is made in a copy of the repository, in which the tests named beside
it are run. It exits with an error if one edit was noticed by none.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
  """An edit: `old`, which is in `file` exactly once, becomes `new`."""

  name: str
  file: str
  old: str
  new: str
  tests: tuple[str, ...]


_LOSSES = 'mrl_jax/losses/'
_SHARING = 'mrl_jax/sharing/'
_MODELS = 'mrl_jax/models/'

MUTATIONS = (
  Mutation(
    'a slice is asked for by its chips, where its type counts cores',
    'mrl_jax/mwra/cloud.py',
    ' * kind.cores',
    '',
    ('tests/mwra/test_cloud.py',),
  ),
  Mutation(
    'a process on a slice has no address of a peer, and trains it too',
    'mrl_jax/mwra/commands.py',
    "keys[f'policies.{peer}.address']",
    "keys[f'policies.{policy}.address']",
    ('tests/mwra/test_commands.py',),
  ),
  Mutation(
    'ssh does not return from the start of a run',
    'mrl_jax/mwra/commands.py',
    '{{ {background} }}',
    '{background}',
    ('tests/mwra/test_commands.py',),
  ),
  Mutation(
    'certificates name nobody',
    'mrl_jax/mwra/commands.py',
    ' -copy_extensions copy',
    '',
    ('tests/mwra/test_commands.py',),
  ),
  Mutation(
    'a program is compiled ahead for arguments that it is not called with',
    'mrl_jax/training/programs.py',
    'packer.abstract(size, part, place)',
    'packer.abstract(size, part)',
    ('tests/training/test_compiling.py',),
  ),
  Mutation(
    'of evaluation and training, the last decides what sampling is compiled ahead',
    'mrl_jax/training/programs.py',
    'most[sampler] = max(prompts, most.get(sampler, 0))',
    'most[sampler] = prompts',
    ('tests/training/test_compiling.py',),
  ),
  Mutation(
    'weights are compiled ahead as if sampling moved all of them',
    'mrl_jax/sampling/move.py',
    'place = source if stays else target',
    'place = target',
    ('tests/training/test_compiling.py',),
  ),
  Mutation(
    'maxima of micro-batches are added',
    'mrl_jax/update/update.py',
    "np.maximum if '/max_' in name else np.add",
    'np.add',
    ('tests/update/test_update.py',),
  ),
  Mutation(
    'an error of writing events is not heard of',
    'mrl_jax/training/metrics.py',
    'self._pending[0].done():\n      self._pending.popleft().result()',
    'self._pending[0].done():\n      self._pending.popleft()',
    ('tests/training/test_metrics.py',),
  ),
  Mutation(
    'the logits of every chunk are kept for the backward pass',
    'mrl_jax/models/logps.py',
    '  function = jax.checkpoint(function)\n',
    '',
    ('tests/models/test_logps.py',),
  ),
  Mutation(
    'only the names of values are compared between hosts',
    'mrl_jax/member.py',
    'names = [n for n in names if leader.get(n) != mine.get(n)]',
    'names = [*{*leader} ^ {*mine}]',
    ('tests/test_cluster.py',),
  ),
  Mutation(
    'hosts that arrived late are taken for those that are missing',
    'mrl_jax/member.py',
    'late = {*range(self.processes)} - {*self._values(key)} if key else {0}',
    'late = {*self._values(key)} if key else {0}',
    ('tests/test_cluster.py',),
  ),
  Mutation(
    'a leader that is lost is not named',
    'mrl_jax/member.py',
    "self._exit([0], 'it cannot be reached')",
    "self._exit([], 'it cannot be reached')",
    ('tests/test_cluster.py',),
  ),
  Mutation(
    'hosts may train different policies',
    'mrl_jax/training/job.py',
    "'policies that are trained here': config_lib.trained_here(config),",
    '',
    ('tests/training/test_job.py',),
  ),
  Mutation(
    'a part of a matrix is read from its beginning',
    'mrl_jax/parameters.py',
    'found.append((start * stride, stop * stride))',
    'found.append((0, (stop - start) * stride))',
    ('tests/test_parameters.py',),
  ),
  Mutation(
    'a silent host is not noticed',
    'mrl_jax/member.py',
    'if silent and self._is_watching:',
    'if not silent and not self._is_watching:',
    ('tests/test_cluster.py',),
  ),
  Mutation(
    'a stop string is not searched for across programs',
    'mrl_jax/training/rollouts.py',
    'needed = len(ids) - new, longest - 1',
    'needed = len(ids) - new, 0',
    ('tests/training/test_rollouts.py',),
  ),
  Mutation(
    'rows go on behind a stop string',
    'mrl_jax/sampling/sampler.py',
    'if (table.live_B != drawn.live_B).any():',
    'if False:',
    ('tests/sampling/test_sampler.py',),
  ),
  Mutation(
    'a stop string crosses with a stop token',
    'mrl_jax/thl/transfer.py',
    "if rollout.finish == 'stop':",
    "if rollout.finish != 'length':",
    ('tests/thl/test_transfer.py',),
  ),
  Mutation(
    'a row that takes a slot keeps the random key of the one before',
    'mrl_jax/sampling/slots.py',
    'key_B=new(slots.key_B, new_key_B)',
    'key_B=slots.key_B',
    ('tests/sampling/test_sampler.py',),
  ),
  Mutation(
    'a row that takes a slot keeps the prompt of the one before',
    'mrl_jax/sampling/slots.py',
    "x_BKCE.at[slot_R].set(x_RKCE, mode='drop', unique_indices=True)",
    'x_BKCE',
    ('tests/sampling/test_sampler.py',),
  ),
  Mutation(
    'a token is searched for from the end of the block before',
    'mrl_jax/sampling/drawing.py',
    'jnp.maximum(goal_B - before_B, 0.0)',
    'goal_B',
    ('tests/sampling/test_drawing.py',),
  ),
  Mutation(
    'every fusion that overlaps a collective counts as one',
    'mrl_jax/training/collectives.py',
    'if kind in KINDS and not _is_stage(instruction, computations[name]):',
    'if kind in KINDS:',
    ('tests/training/test_collectives.py',),
  ),
  Mutation(
    'the optimizer is forgotten while gradients are computed',
    'mrl_jax/training/programs.py',
    'beside = (state.opt_state, state.reference, copied)',
    'beside = (copied,)',
    ('tests/training/test_proof.py',),
  ),
  Mutation(
    'a program fits whatever else is in memory',
    'mrl_jax/training/proof.py',
    'self.memory.peak + self.beside - self.capacity',
    'self.memory.peak - self.capacity',
    ('tests/training/test_proof.py',),
  ),
  Mutation(
    'statistics of any spread',
    'mrl_jax/records.py',
    'mean_square <= largest + slack * scale',
    'mean_square <= largest + 1e12',
    ('tests/test_records.py', 'tests/see/test_inbox.py'),
  ),
  Mutation(
    'an empty message of a distant round ends all before it',
    'mrl_jax/see/inbox.py',
    'return bool(sound) or round == self.finished[sender] + 1',
    'return True',
    ('tests/see/test_inbox.py', 'tests/see/test_rpc.py'),
  ),
  Mutation(
    'a certificate of the authority speaks for every policy',
    'mrl_jax/see/rpc.py',
    'speaks_for is not None and message.sender not in speaks_for',
    'speaks_for is not None and not speaks_for',
    ('tests/see/test_security.py',),
  ),
  Mutation(
    'a message without news is kept on disk',
    'mrl_jax/see/rpc.py',
    "name = store() if is_new else ''",
    'name = store()',
    ('tests/see/test_rpc.py',),
  ),
  Mutation(
    'sign of the advantage',
    _SHARING + 'grpo.py',
    'difference_PG = rewards_PG - mean_P1',
    'difference_PG = mean_P1 - rewards_PG',
    ('tests/sharing/test_grpo.py',),
  ),
  Mutation(
    'sign of the loss',
    'mrl_jax/update/update.py',
    'return -jnp.sum(rows.weight_BS * objective_BS)',
    'return jnp.sum(rows.weight_BS * objective_BS)',
    ('tests/update/test_update.py',),
  ),
  Mutation(
    'a packed row is one response to GSPO',
    _LOSSES + 'gspo.py',
    'jax.ops.segment_sum(x_T, row_T, count)[row_T]',
    'x_T.sum() + 0 * x_T',
    ('tests/losses/test_gspo.py',),
  ),
  Mutation(
    'tokens see the rows that are packed before theirs',
    _MODELS + 'attention.py',
    '(row_BT[:, :, None] == row_BT[:, None, :])',
    '(row_BT[:, None, :] > 0)',
    ('tests/models/test_attention.py', 'tests/models/test_decoder.py'),
  ),
  Mutation(
    'a block of queries that is skipped in the backward pass',
    _MODELS + 'blockwise.py',
    'jnp.minimum(last_N[j] + 1,',
    'jnp.minimum(last_N[j],',
    ('tests/models/test_attention.py',),
  ),
  Mutation(
    'positions go on from one packed row to the next',
    _MODELS + 'decoder.py',
    'jnp.arange(row_BT.shape[1])[None] - first_BT',
    'jnp.arange(row_BT.shape[1])[None] + 0 * first_BT',
    ('tests/models/test_decoder.py',),
  ),
  Mutation(
    'chunks of several responses share their numbers',
    'mrl_jax/training/packing.py',
    "('chunk', start + row.chunk)",
    "('chunk', 1 + row.chunk)",
    ('tests/training/test_packing.py', 'tests/update/test_packed.py'),
  ),
  Mutation(
    'prompts are scored as responses are',
    'mrl_jax/update/update.py',
    'jnp.where(rows.is_response_BS, x_BS, 0.0)',
    'x_BS',
    ('tests/update/test_update.py',),
  ),
  Mutation(
    'leave-one-out of n rewards',
    _SHARING + 'grpo.py',
    'count_P1 / np.maximum(count_P1 - 1, 1)',
    'count_P1 / np.maximum(count_P1, 1)',
    ('tests/sharing/test_grpo.py',),
  ),
  Mutation(
    'peers left out of the pooled baseline',
    _SHARING + 'xgrpo.py',
    'sum(peers, context.own_moments_P3)',
    'context.own_moments_P3',
    ('tests/sharing/test_xgrpo.py',),
  ),
  Mutation(
    'GRPO clip bounds swapped',
    _LOSSES + 'grpo.py',
    'jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)',
    'jnp.clip(ratio_BT, 1 - clip_high, 1 + clip_low)',
    ('tests/losses/test_grpo.py',),
  ),
  Mutation(
    'GRPO maximum for minimum',
    _LOSSES + 'grpo.py',
    'jnp.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)',
    'jnp.maximum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)',
    ('tests/losses/test_grpo.py',),
  ),
  Mutation(
    'mask dropped from the weights',
    'mrl_jax/training/packing.py',
    'weight * row.weight * row.mask',
    'weight * row.weight',
    ('tests/training/test_packing.py',),
  ),
  Mutation(
    'mask dropped from the scores',
    'mrl_jax/models/logps.py',
    'jnp.where(is_scored_BS, jnp.roll(x_BS, 1, axis=1), 0.0)',
    'jnp.roll(x_BS, 1, axis=1)',
    ('tests/models/test_logps.py',),
  ),
  Mutation(
    'mean over T instead of tokens',
    'mrl_jax/training/packing.py',
    "'token_mean': lambda length, tokens, **_: 1 / tokens",
    "'token_mean': lambda rows, longest, **_: 1 / (rows * longest)",
    ('tests/training/test_packing.py',),
  ),
  Mutation(
    'GSPO mean over T instead of tokens',
    _LOSSES + 'gspo.py',
    'length_BT = jnp.maximum(_sums(mask_BT.astype(jnp.float32), row_BT), 1)',
    'length_BT = logp_BT.shape[1]',
    ('tests/losses/test_gspo.py',),
  ),
  Mutation(
    'GSPO length normalisation removed',
    _LOSSES + 'gspo.py',
    '_sums(difference_BT, row_BT) / length_BT',
    '_sums(difference_BT, row_BT)',
    ('tests/losses/test_gspo.py',),
  ),
  Mutation(
    'GSPO stop-gradient dropped',
    _LOSSES + 'gspo.py',
    'constant_BT = jax.lax.stop_gradient(logp_BT)',
    'constant_BT = logp_BT',
    ('tests/losses/test_gspo.py',),
  ),
  Mutation(
    'PRP stop-gradient dropped',
    _LOSSES + 'prp.py',
    'jax.lax.stop_gradient(logp_BT) - behaviour_logp_BT',
    'logp_BT - behaviour_logp_BT',
    ('tests/losses/test_prp.py',),
  ),
  Mutation(
    'PRP truncation off',
    _LOSSES + 'prp.py',
    'jnp.exp(jnp.minimum(log_ratio_BT, jnp.log(max_ratio)))',
    'jnp.exp(log_ratio_BT)',
    ('tests/losses/test_prp.py',),
  ),
  Mutation(
    'PRP denominators never recomputed',
    _SHARING + 'prp.py',
    'found = context.rescore(found)',
    'row',
    ('tests/sharing/test_prp.py',),
  ),
  Mutation(
    'SGT gate always open',
    _SHARING + 'select.py',
    'not context.successes_P[group.prompt] and group.successes',
    'group.successes',
    ('tests/sharing/test_select.py', 'tests/test_algorithms.py'),
  ),
  Mutation(
    'all texts of a round are encoded at once, in any memory',
    'mrl_jax/thl/byte_tokenizer.py',
    'if size >= _BATCH_BYTES:',
    'if False:',
    ('tests/thl/test_byte_tokenizer.py',),
  ),
  Mutation(
    'bytes that are no text disappear from a batch',
    'mrl_jax/thl/byte_tokenizer.py',
    'if isinstance(part, str) else part)',
    'if isinstance(part, str) else [])',
    ('tests/thl/test_byte_tokenizer.py',),
  ),
  Mutation(
    'a batch is not aligned with rollouts that need no encoding',
    'mrl_jax/thl/transfer.py',
    '    if rollout.header.tokenizer != receiver.fingerprint\n',
    '',
    ('tests/thl/test_transfer.py',),
  ),
  Mutation(
    'a stale message is forgotten, although a restart would need it',
    'mrl_jax/see/inbox.py',
    'if self._resumes <= round < self._oldest:',
    'if False:',
    ('tests/see/test_rpc.py',),
  ),
  Mutation(
    'every peer gets a record that is encoded anew',
    'mrl_jax/see/exchange.py',
    'encode = functools.cache(wire.encode)',
    'encode = wire.encode',
    ('tests/see/test_node.py',),
  ),
  Mutation(
    'groups that are not drawn are judged all the same',
    'mrl_jax/algorithms.py',
    'Which(select.everything, select.drawn)',
    'Which(select.everything, select.everything)',
    ('tests/test_algorithms.py',),
  ),
  Mutation(
    'peers send groups that nobody draws',
    'mrl_jax/see/exchange.py',
    'self._addressed(shared, peer)',
    'shared',
    ('tests/training/test_peers.py',),
  ),
  Mutation(
    'all learners draw the same peer',
    _SHARING + 'select.py',
    'header.prompt, learner, peer)',
    'header.prompt, peer)',
    ('tests/sharing/test_select.py',),
  ),
  Mutation(
    'balance knows only where a whole group fails',
    'mrl_jax/algorithms.py',
    'Which(select.balanced, select.where_any_fails)',
    'Which(select.balanced, select.where_all_fail)',
    ('tests/test_algorithms.py',),
  ),
  Mutation(
    'peers believed',
    _SHARING + 'peer_groups.py',
    'rollouts=judged)',
    'rollouts=group)',
    ('tests/sharing/test_peer_groups.py',),
  ),
  Mutation(
    'statistics of rollouts that crossed believed',
    _SHARING + 'context.py',
    'return [_recomputed(r, rewards) for r in judged]',
    'return judged',
    ('tests/sharing/test_context.py',),
  ),
  Mutation(
    'advantages moved without bound',
    'mrl_jax/algorithms.py',
    "if self.parts.baseline == 'own' or not bound:",
    'if True:',
    ('tests/test_algorithms.py',),
  ),
  Mutation(
    'first ratios to the sampler',
    'mrl_jax/update/objectives.py',
    'jnp.where(rows.mini_batch_B1 == 0, before_BS, old_logp_BS)',
    'old_logp_BS',
    ('tests/update/test_objectives.py',),
  ),
  Mutation(
    'trainer at temperature 1',
    _MODELS + 'logps.py',
    'logits_BTV /= temperature',
    'logits_BTV /= 1.0',
    ('tests/update/test_temperature.py',),
  ),
  Mutation(
    'SGT weight ignored',
    _SHARING + 'sgt.py',
    'weight = context.settings.sgt.weight',
    'weight = 1.0',
    ('tests/sharing/test_sgt.py',),
  ),
  Mutation(
    'HACPO weight inverted',
    _SHARING + 'hacpo.py',
    'weight = 1 / context.capability_ratio[peer]',
    'weight = context.capability_ratio[peer]',
    ('tests/sharing/test_hacpo.py',),
  ),
  Mutation(
    'HACPO baseline ratio inverted',
    _SHARING + 'hacpo.py',
    'capability[learner] / other',
    'other / capability[learner]',
    ('tests/sharing/test_hacpo.py',),
  ),
  Mutation(
    'HACPO stepwise clip off',
    _LOSSES + 'hacpo.py',
    'inside_BT = (ratio_BT >= low_B1) & (ratio_BT <= high)',
    'inside_BT = ratio_BT >= -jnp.inf',
    ('tests/losses/test_hacpo.py',),
  ),
  Mutation(
    'HACPO lower bound without steps',
    _LOSSES + 'hacpo.py',
    '1 - delta + mini_batch_B1 * delta_step',
    '1 - delta + 0 * mini_batch_B1',
    ('tests/losses/test_hacpo.py',),
  ),
  Mutation(
    'HACPO stop-gradient of the weight dropped',
    _LOSSES + 'hacpo.py',
    'clipped_BT = jax.lax.stop_gradient(jnp.clip(ratio_BT, low_B1, high))',
    'clipped_BT = jnp.clip(ratio_BT, low_B1, high)',
    ('tests/losses/test_hacpo.py',),
  ),
  Mutation(
    'GRAFT order',
    _SHARING + 'graft.py',
    "{'last': 1, 'first': -1, 'uniform': 0}",
    "{'last': -1, 'first': 1, 'uniform': 0}",
    ('tests/sharing/test_graft.py',),
  ),
  Mutation(
    'GRAFT gate',
    _SHARING + 'graft.py',
    'compatibility_B > graft.floor',
    'compatibility_B < graft.floor',
    ('tests/sharing/test_graft.py',),
  ),
  Mutation(
    'GRAFT weight above one',
    _SHARING + 'graft.py',
    'float(min(s, 1.0))',
    'float(s)',
    ('tests/sharing/test_graft.py',),
  ),
  Mutation(
    'GRAFT balance',
    _SHARING + 'select.py',
    'if 0 < back < len(ranked):',
    'if False:',
    ('tests/sharing/test_select.py',),
  ),
  Mutation(
    'GRAFT ties cut',
    _SHARING + 'select.py',
    'ranked = [group for group in ranked if group.successes >= least]',
    'ranked = ranked[:back]',
    ('tests/sharing/test_select.py',),
  ),
  Mutation(
    'GRAFT beside the group it replaces',
    'mrl_jax/algorithms.py',
    'replaced = prompts if self.how and self.how.replaces else ()',
    'replaced = ()',
    ('tests/test_algorithms.py',),
  ),
  Mutation(
    'off by one in the shift',
    'mrl_jax/models/logps.py',
    'jnp.roll(tokens_BS, -1, axis=1)',
    'tokens_BS',
    ('tests/models/test_logps.py',),
  ),
  Mutation(
    'KL against the old policy',
    'mrl_jax/update/objectives.py',
    'kl.estimate(logp_BS, rows.reference_logp_BS, settings.kl_form)',
    'kl.estimate(logp_BS, logp_BS, settings.kl_form)',
    ('tests/update/test_objectives.py',),
  ),
  Mutation(
    'KL as a bonus',
    'mrl_jax/update/objectives.py',
    'objective_BS -= settings.kl_weight * kl_BS',
    'objective_BS += settings.kl_weight * kl_BS',
    ('tests/update/test_objectives.py',),
  ),
  Mutation(
    'dual clip off',
    _LOSSES + 'grpo.py',
    'floor_BT = jnp.maximum(objective_BT, dual_clip * advantage_B1)',
    'floor_BT = objective_BT',
    ('tests/losses/test_grpo.py',),
  ),
  Mutation(
    'deviation of equal rewards',
    _SHARING + 'grpo.py',
    'return np.where(all_equal(moments_P3), 1.0, unit_P1)',
    'return unit_P1',
    ('tests/sharing/test_grpo.py',),
  ),
  Mutation(
    'overlong penalty a reward',
    'mrl_jax/rewards/functions.py',
    '-min(max(',
    'min(max(',
    ('tests/rewards/test_functions.py',),
  ),
  Mutation(
    'dynamic sampling keeps what all solved',
    'mrl_jax/training/dynamic_sampling.py',
    'return 0 < sum(rollout.success for rollout in group) < len(group)',
    'return 0 < sum(rollout.success for rollout in group)',
    ('tests/training/test_dynamic_sampling.py',),
  ),
  Mutation(
    'SGT over rescued prompts only',
    _SHARING + 'sgt.py',
    "{'batch': 'prompts', 'rescue': 'rows'}",
    "{'batch': 'rows', 'rescue': 'rows'}",
    ('tests/test_algorithms.py',),
  ),
  Mutation(
    'mini-batches all the first',
    'mrl_jax/training/packing.py',
    "arrays['mini_batch_B1'][:] = mini_batch",
    "arrays['mini_batch_B1'][:] = 0",
    ('tests/training/test_packing.py',),
  ),
  Mutation(
    'rows under a penalty dropped',
    'mrl_jax/training/packing.py',
    "(row.advantage or (self.keep_all and name == 'own'))",
    'row.advantage',
    ('tests/training/test_packing.py',),
  ),
  Mutation(
    'HACPO window of all rounds',
    _SHARING + 'hacpo.py',
    'accuracies[-window:]',
    'accuracies[-99:]',
    ('tests/sharing/test_hacpo.py',),
  ),
  Mutation(
    'HACPO mean beyond any reward',
    _SHARING + 'hacpo.py',
    'np.where(mean_P1 > 1, grpo.baseline(own_P3).mean_P1, mean_P1)',
    'mean_P1',
    ('tests/sharing/test_hacpo.py',),
  ),
  Mutation(
    'HACPO alpha ignored',
    _LOSSES + 'hacpo.py',
    'value_BT * clipped_BT**alpha * advantage_B1',
    'value_BT * advantage_B1',
    ('tests/losses/test_hacpo.py',),
  ),
  Mutation(
    'HACPO ratios unbounded',
    'mrl_jax/update/objectives.py',
    '    _MAX_LOG_RATIO,\n',
    '',
    ('tests/update/test_objectives.py',),
  ),
  Mutation(
    'GRAFT compatibility inverted',
    _SHARING + 'graft.py',
    'np.clip(difference_B, -_MAX',
    'np.clip(np.negative(difference_B), -_MAX',
    ('tests/sharing/test_graft.py',),
  ),
  Mutation(
    'GRAFT balance counts what this policy always solves',
    _SHARING + 'select.py',
    'and 0 < context.successes_P[group.prompt] < context.group_size',
    'and 0 < context.successes_P[group.prompt]',
    ('tests/sharing/test_select.py',),
  ),
  Mutation(
    'entropy as a penalty',
    'mrl_jax/update/objectives.py',
    'objective_BS += settings.entropy_weight',
    'objective_BS -= settings.entropy_weight',
    ('tests/update/test_objectives.py', 'tests/update/test_update.py'),
  ),
  Mutation(
    'correction without its cap',
    _SHARING + 'correction.py',
    'return np.minimum(weight_T, settings.cap).astype(np.float32)',
    'return weight_T.astype(np.float32)',
    ('tests/sharing/test_correction.py',),
  ),
  Mutation(
    'correction inverted',
    _SHARING + 'correction.py',
    'trainer_logp.astype(np.float64) - sampler_logp',
    'sampler_logp.astype(np.float64) - trainer_logp',
    ('tests/sharing/test_correction.py',),
  ),
  Mutation(
    'a window one position wider',
    _MODELS + 'attention.py',
    'distance_TS < window',
    'distance_TS <= window',
    ('tests/models/test_parity.py', 'tests/models/test_attention.py'),
  ),
  Mutation(
    'a window of the blocks one position wider',
    _MODELS + 'blockwise.py',
    'distance_ts < settings.window',
    'distance_ts <= settings.window',
    ('tests/models/test_attention.py',),
  ),
  Mutation(
    'a gradient of the blocks without its centre',
    _MODELS + 'blockwise.py',
    '(d_weight_BKRts - centre_BKRt1)',
    'd_weight_BKRts',
    ('tests/models/test_attention.py',),
  ),
  Mutation(
    'a row sees the tokens of the row before it in its slot',
    _MODELS + 'cache.py',
    'seen_BR = before_1R <= age_B1',
    'seen_BR = before_1R <= age_B1 + 1',
    ('tests/models/test_cache.py', 'tests/models/test_decoder.py'),
  ),
  Mutation(
    'a ring of another size begins at the wrong token',
    _MODELS + 'cache.py',
    'before_R = 1 + (step - 1 - jnp.arange(size)) % size',
    'before_R = 1 + (step - jnp.arange(size)) % size',
    ('tests/models/test_cache.py',),
  ),
  Mutation(
    'layers after the scanned groups are forgotten',
    _MODELS + 'decoder.py',
    'return self.final_norm(read(x_BTD, rest))',
    'return self.final_norm(x_BTD if scanned else read(x_BTD, rest))',
    ('tests/models/test_decoder.py',),
  ),
  Mutation(
    'the head gathered without its other parts',
    _MODELS + 'sharding.py',
    "jax.lax.all_gather(part, 'fsdp')",
    "jax.lax.all_gather(part, 'fsdp')[::-1]",
    ('tests/update/test_update.py',),
  ),
  Mutation(
    'no cap of the logits',
    _MODELS + 'decoder.py',
    'return attention.soft_cap(logits_BTV, self.config.logit_cap)',
    'return logits_BTV',
    ('tests/models/test_parity.py',),
  ),
  Mutation(
    'scores not by the size that the config gives',
    'mrl_jax/architecture.py',
    '(self.query_size or self.head_dim) ** -0.5',
    'self.head_dim**-0.5',
    ('tests/models/test_parity.py',),
  ),
  Mutation(
    'positions in every layer of SmolLM3',
    _MODELS + 'families.py',
    'rope=None)',
    'rope=layer.rope)',
    ('tests/models/test_parity.py', 'tests/models/test_families.py'),
  ),
  Mutation(
    'local and global layers of Gemma 3 turn alike',
    _MODELS + 'families.py',
    'rope.get(kind, rope)',
    "rope.get('full_attention', rope)",
    ('tests/models/test_parity.py',),
  ),
  Mutation(
    'Llama 3 ramp inverted',
    _MODELS + 'rope.py',
    'jnp.clip((turns_I - rope.low)',
    '1 - jnp.clip((turns_I - rope.low)',
    ('tests/models/test_rope.py',),
  ),
  Mutation(
    'YaRN without its amplitude',
    _MODELS + 'rope.py',
    'return sin_B1TI * rope.amplitude, cos_B1TI * rope.amplitude',
    'return sin_B1TI, cos_B1TI',
    ('tests/models/test_parity.py',),
  ),
  Mutation(
    'adapters scaled by alpha alone',
    _MODELS + 'modules.py',
    'self.scale = config.lora.alpha / config.lora.rank',
    'self.scale = config.lora.alpha',
    ('tests/models/test_modules.py',),
  ),
  Mutation(
    'adapters merged by alpha alone',
    _MODELS + 'hf_weights.py',
    'scale = config.lora.alpha / config.lora.rank',
    'scale = config.lora.alpha',
    ('tests/models/test_hf_weights.py',),
  ),
  Mutation(
    'rows and columns of a matrix swapped',
    'mrl_jax/parameters.py',
    'axes = inputs + outputs, outputs, inputs',
    'axes = inputs + outputs, inputs, outputs',
    ('tests/models/test_hf_weights.py',),
  ),
  Mutation(
    'norms of Gemma 2 in another order',
    'mrl_jax/parameters.py',
    "'mlp_norm': 'pre_feedforward_layernorm',",
    "'mlp_norm': 'post_attention_layernorm',",
    ('tests/models/test_parity.py', 'tests/test_parameters.py'),
  ),
  Mutation(
    'scales of norms cast',
    _MODELS + 'decoder.py',
    "if path[-1] == 'scale':",
    'if False:',
    ('tests/models/test_decoder.py',),
  ),
  Mutation(
    'adapters trained beside all else',
    _MODELS + 'decoder.py',
    'trained = nnx.LoRAParam if decoder.config.lora else nnx.Param',
    'trained = nnx.Param',
    ('tests/update/test_update.py',),
  ),
  Mutation(
    'rescues of prompts that did not fail',
    'mrl_jax/algorithms.py',
    'return len(failed & prompts) / len(failed)',
    'return len(prompts) / len(failed)',
    ('tests/test_algorithms.py',),
  ),
  Mutation(
    'histogram of tokens that are masked',
    'mrl_jax/update/objectives.py',
    'where=rows.mask_BS[..., None], dtype',
    'dtype',
    ('tests/update/test_objectives.py',),
  ),
  Mutation(
    'histogram shifted by a bin',
    'mrl_jax/update/objectives.py',
    'log_ratio_BS[..., None] > edges_11E',
    'log_ratio_BS[..., None] > 0.1 + edges_11E',
    ('tests/update/test_objectives.py',),
  ),
  Mutation(
    'sums of the last mini-batch alone',
    'mrl_jax/training/statistics.py',
    'add(sums.get(name, 0.0), np.asarray(value, np.float64))',
    'add(0.0, np.asarray(value, np.float64))',
    ('tests/training/test_statistics.py',),
  ),
  Mutation(
    'error over samples',
    'mrl_jax/training/evaluation.py',
    'share_P = success_PG.mean(1)',
    'share_P = success_PG.reshape(-1)',
    ('tests/training/test_evaluation.py',),
  ),
  Mutation(
    'error of a population',
    'mrl_jax/training/evaluation.py',
    'share_P.std(ddof=1)',
    'share_P.std()',
    ('tests/training/test_evaluation.py',),
  ),
  Mutation(
    'best completions of easy prompts',
    'mrl_jax/training/evaluation.py',
    'return (-rollout.reward, accuracy, prompt.id)',
    'return (-rollout.reward, -accuracy, prompt.id)',
    ('tests/training/test_evaluation.py',),
  ),
  Mutation(
    'worst completions that are least sure',
    'mrl_jax/training/evaluation.py',
    'return (rollout.reward, -_mean_logp(rollout), prompt.id)',
    'return (rollout.reward, _mean_logp(rollout), prompt.id)',
    ('tests/training/test_evaluation.py',),
  ),
  Mutation(
    'completions of one family',
    'mrl_jax/training/evaluation.py',
    'seen[prompt.family] += 1',
    'pass',
    ('tests/training/test_evaluation.py',),
  ),
  Mutation(
    'verification counted twice',
    'mrl_jax/training/stopwatch.py',
    'left -= share',
    'pass',
    ('tests/training/test_stopwatch.py',),
  ),
  Mutation(
    'laps that add up',
    'mrl_jax/training/stopwatch.py',
    'phases, self._phases = self._phases, collections.defaultdict(float)',
    'phases = self._phases',
    ('tests/training/test_stopwatch.py',),
  ),
  Mutation(
    'the evaluation of the checkpoint dropped',
    'mrl_jax/training/metrics.py',
    "self._keep(workdir.EVALUATIONS, 'rounds', self._done)",
    "self._keep(workdir.EVALUATIONS, 'rounds', self._done - 1)",
    ('tests/training/test_metrics.py',),
  ),
  Mutation(
    'completions as markup',
    'mrl_jax/training/metrics.py',
    "'    ' + texts.printable(line)",
    'texts.printable(line)',
    ('tests/training/test_metrics.py',),
  ),
  Mutation(
    'damaged checkpoint used',
    'mrl_jax/update/checkpoint.py',
    'changed = files.digest(os.path.join(path, name)) != digest',
    'changed = files.digest(os.path.join(path, name)) < 0',
    ('tests/update/test_checkpoint.py',),
  ),
  Mutation(
    'round left behind without its state',
    'mrl_jax/training/stopping.py',
    'if self._save is None or not self._save():',
    'if self._save is None or self._save():',
    ('tests/training/test_stopping.py',),
  ),
  Mutation(
    'line without its end kept',
    'mrl_jax/training/metrics.py',
    "if not (line.endswith(b'\\n') and isinstance(row, dict)):",
    'if not isinstance(row, dict):',
    ('tests/training/test_metrics.py',),
  ),
  Mutation(
    'work dir shared by two runs',
    'mrl_jax/workdir.py',
    'fcntl.LOCK_EX | fcntl.LOCK_NB',
    'fcntl.LOCK_SH | fcntl.LOCK_NB',
    ('tests/test_workdir.py',),
  ),
  Mutation(
    "e is Euler's number in 4.5e33",
    'mrl_jax/rewards/spelling.py',
    "r'(\\d\\.?)[eE]([-+]?\\d+)(?![\\d.])', r'\\1 \\\\times 10^{\\2}'",
    "r'(\\d\\.?)[eE]([-+]?\\d+)(?![\\d.])', r'\\1 e \\2'",
    ('tests/rewards/test_spelling.py',),
  ),
  Mutation(
    'deadlines by the wall clock',
    'mrl_jax/processes.py',
    'signal.setitimer(signal.ITIMER_PROF, cpu_s)',
    'signal.setitimer(signal.ITIMER_REAL, cpu_s)',
    ('tests/test_processes.py',),
  ),
  Mutation(
    'a timeout as a false claim of a peer',
    _SHARING + 'context.py',
    'if verdict in records.UNDECIDED:',
    'if False:',
    ('tests/sharing/test_context.py',),
  ),
  Mutation(
    'slow answers take all of their time',
    'mrl_jax/rewards/mathematics.py',
    'while slow and pool.cpu_s < most:',
    'while slow:',
    ('tests/rewards/test_mathematics.py',),
  ),
  Mutation(
    'a share of faulty gold answers is no error',
    'mrl_jax/training/inputs.py',
    'len(bad) <= most * len(prompts),',
    'len(bad) <= len(prompts),',
    ('tests/training/test_inputs.py',),
  ),
  Mutation(
    'slices of policies overlap',
    'mrl_jax/mwra/carve.py',
    'if extend(taken | bits[j], thorough):',
    'if extend(taken, thorough):',
    ('tests/mwra/test_carve.py',),
  ),
  Mutation(
    'a slice has parts of two hosts',
    'mrl_jax/mwra/topology.py',
    'x % host + extent <= host if extent < host',
    'True if extent < host',
    ('tests/mwra/test_carve.py',),
  ),
  Mutation(
    'the most devices that meet the makespan',
    'mrl_jax/mwra/carve.py',
    'heapq.heappush(queue, (total + more, following))',
    'heapq.heappush(queue, (total - more, following))',
    ('tests/mwra/test_carve.py',),
  ),
  Mutation(
    "memory of peers' rows is that of own rows",
    'mrl_jax/mwra/cost.py',
    "('peer gradient', peers, shape.peer_tokens)",
    "('peer gradient', peers, shape.response_tokens)",
    ('tests/mwra/test_cost.py',),
  ),
  Mutation(
    'an update may need more memory than there is',
    'mrl_jax/mwra/layouts.py',
    'if phases[program].bytes <= room:',
    'if rows:',
    ('tests/mwra/test_layouts.py',),
  ),
  Mutation(
    'policies that take turns forget the states of others',
    'mrl_jax/mwra/planner.py',
    'reserved = {name: sum(states.values()) - states[name] for name in models}',
    'reserved = dict.fromkeys(models, 0.0)',
    ('tests/mwra/test_planner.py',),
  ),
)


def apply(mutation: Mutation, root: pathlib.Path) -> None:
  """Edits the file of a copy; the text must be there exactly once."""
  path = root / mutation.file
  text = path.read_text()
  found = text.count(mutation.old)
  if found != 1:
    raise ValueError(
      f'{mutation.name}: {mutation.old!r} is {found} times in {mutation.file}'
    )
  path.write_text(text.replace(mutation.old, mutation.new))


def caught_by(mutation: Mutation) -> list[str]:
  """The tests that fail on a copy with this edit."""
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder) / 'copy'
    for name in ('mrl_jax', 'configs', 'launch', 'tests'):
      shutil.copytree(ROOT / name, root / name)
    shutil.copy(ROOT / '.pytest.ini', root)
    apply(mutation, root)
    done = subprocess.run(
      [
        sys.executable,
        '-m',
        'pytest',
        '-q',
        '-rf',
        '--no-header',
        *mutation.tests,
      ],
      cwd=root,
      # The copy, not the package that is installed.
      env={**os.environ, 'PYTHONPATH': os.fspath(root)},
      capture_output=True,
      text=True,
      check=False,
    )
  lines = done.stdout.splitlines()
  failed = [line.split()[1] for line in lines if line.startswith('FAILED')]
  if done.returncode not in (0, 1):  # Not a matter of passing or failing.
    raise RuntimeError(f'{mutation.name}: pytest said\n{done.stdout}')
  return failed


def main() -> int:
  wanted = [word.lower() for word in sys.argv[1:]]
  survived = []
  for mutation in MUTATIONS:
    if wanted and not any(word in mutation.name.lower() for word in wanted):
      continue
    caught = caught_by(mutation)
    print(f'{len(caught):3} caught {mutation.name}', flush=True)
    for test in caught[:3]:
      print(f'      {test}')
    if not caught:
      survived.append(mutation.name)
  if survived:
    print(f'Noticed by no test: {", ".join(survived)}')
  return bool(survived)


if __name__ == '__main__':
  sys.exit(main())
