import yaml

yaml.load("")
