from work import run

run(input(), shell=True)
