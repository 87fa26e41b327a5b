"""Countries by ISO code: the name in English, as Tavily takes it, and the main language, as SearXNG does."""

from __future__ import annotations

from typing import NamedTuple


class Country(NamedTuple):
    name: str
    language: str


_TABLE = """
AE united arab emirates ar|AR argentina es|AT austria de|AU australia en|BE belgium nl|BG bulgaria bg|BR brazil pt|CA canada en
CH switzerland de|CL chile es|CN china zh|CO colombia es|CZ czech republic cs|DE germany de|DK denmark da|EE estonia et
EG egypt ar|ES spain es|FI finland fi|FR france fr|GB united kingdom en|GR greece el|HR croatia hr|HU hungary hu
ID indonesia id|IE ireland en|IL israel he|IN india en|IS iceland is|IT italy it|JP japan ja|KE kenya en|KR south korea ko
LT lithuania lt|LU luxembourg fr|LV latvia lv|MA morocco ar|MX mexico es|MY malaysia ms|NG nigeria en|NL netherlands nl
NO norway no|NZ new zealand en|PE peru es|PH philippines en|PK pakistan en|PL poland pl|PT portugal pt|RO romania ro
RS serbia sr|RU russia ru|SA saudi arabia ar|SE sweden sv|SG singapore en|SI slovenia sl|SK slovakia sk|TH thailand th
TR turkey tr|TW taiwan zh|UA ukraine uk|US united states en|UY uruguay es|VN vietnam vi|ZA south africa en
"""


def _read(entry: str) -> tuple[str, Country]:
    code, *name, language = entry.split()
    return code, Country(" ".join(name), language)


COUNTRIES = dict(_read(entry) for line in _TABLE.split("\n") for entry in line.split("|") if entry)
