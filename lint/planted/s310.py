import urllib.request

urllib.request.urlopen(input())
