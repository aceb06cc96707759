import os

os.system(input())
