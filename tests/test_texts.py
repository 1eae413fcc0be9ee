from mrl_jax import texts


def test_names_are_shown_as_they_are_but_for_control():
  assert texts.printable('a b\\[bold]∎') == 'a b\\[bold]∎'
  assert texts.printable('\x1b[2J\udcff') == '\\x1b[2J\\xff'
  assert texts.printable('e\u0301') == 'e\\u0301'
