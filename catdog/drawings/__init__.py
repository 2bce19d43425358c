"""Drawn cats and dogs: something to train on where there is nothing to download.

    pen ◀── colours ◀── coats ◀── looks ◀── cats, dogs ◀── bodies ◀─┐
                  ◀── things ◀── scenery ◀────────────────────────── camera ◀── archive

`camera` makes one image, `archive` a train.zip of them.
"""
