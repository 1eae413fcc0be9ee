import pytest

from tests import mutations


@pytest.mark.parametrize(
  'mutation', mutations.MUTATIONS, ids=lambda mutation: mutation.name
)
def test_every_edit_still_fits_the_code(mutation):
  text = (mutations.ROOT / mutation.file).read_text()
  assert text.count(mutation.old) == 1
  assert mutation.new not in (mutation.old, text)
  assert all((mutations.ROOT / test).exists() for test in mutation.tests)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['GRAFT gate', 'SGT gate always open'])
def test_an_edit_is_noticed_by_a_test_that_passes_without_it(name):
  (mutation,) = [m for m in mutations.MUTATIONS if m.name == name]
  assert mutations.caught_by(mutation)
  assert not mutations.caught_by(mutation._replace(new=mutation.old))
