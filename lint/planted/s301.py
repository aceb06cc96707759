import pickle

pickle.loads(b"")
