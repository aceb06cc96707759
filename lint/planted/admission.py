def check(size):
    assert size < 10
