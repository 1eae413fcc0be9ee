"""Mutual reinforcement learning: different language models learn together.

Arrays carry their shape in their name: `logp_BT` is [rows, positions]. The
letters, everywhere in this package:

  B  rows (B = P * G when sampling)     N  policies, or peers of one
  P  prompts                            M  micro-batches
  G  samples a prompt                   U  bytes
  T  positions (of a response, where a prompt stands beside it)
  C  prompt positions                   S  slots, prompt and response (C + T)
  V  vocabulary                         L  layers
  D  model                              F  feed-forward
  H  query heads                        K  key/value heads
  R  query heads a key/value head       E  head size
  I  half a head
"""
