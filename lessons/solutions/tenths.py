def nelbo(ce):
    return sum(ce) / len(ce)


def shown(ce):
    return ce[1]  # 15 % is between 10 and 20 %
