from mrl_jax import texts


def test_only_control_characters_and_combining_marks_are_escaped():
  assert texts.printable('a b\\[bold]∎') == 'a b\\[bold]∎'
  assert texts.printable('\x1b[2J\udcff') == '\\x1b[2J\\xff'
  assert texts.printable('e\u0301') == 'e\\u0301'
