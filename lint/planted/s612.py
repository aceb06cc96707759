import logging.config

t = logging.config.listen(9999)
