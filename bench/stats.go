package main

import (
	"math"
	"slices"
)

// median returns the middle value of x, NaN of none.
func median(x []float64) float64 { return quantile(x, 0.5) }

// quantile returns the q-quantile of x, q from 0 to 1, interpolated between
// the two nearest values; NaN of none.
func quantile(x []float64, q float64) float64 {
	if len(x) == 0 {
		return math.NaN()
	}
	x = slices.Sorted(slices.Values(x))
	at := q * float64(len(x)-1)
	i := int(at)
	if i+1 == len(x) {
		return x[i]
	}
	return x[i] + (at-float64(i))*(x[i+1]-x[i])
}

// wanted is the least confidence of an interval, where so few rounds allow it.
const wanted = 0.8

// interval returns the narrowest pair of values of x, equally far from its
// ends, between which the median of what x was drawn from lies with a
// confidence of at least wanted; where there are too few values for that, the
// least and the greatest. It is the interval of the sign test, so it supposes
// nothing about how the values are spread.
func interval(x []float64) (lo, hi, confidence float64) {
	n := len(x)
	if n == 0 {
		return math.NaN(), math.NaN(), 0
	}
	x = slices.Sorted(slices.Values(x))
	lo, hi, confidence = x[0], x[n-1], covered(n, 0)
	for k := 1; 2*k < n-1; k++ {
		c := covered(n, k)
		if c < wanted {
			break
		}
		lo, hi, confidence = x[k], x[n-1-k], c
	}
	return lo, hi, confidence
}

// covered is how likely the median lies between the values number k and n-1-k
// of n in their order: that neither side has k or fewer of n fair coins.
func covered(n, k int) float64 {
	tail, choose := 0.0, 1.0
	for i := 0; i <= k; i++ {
		tail += choose
		choose *= float64(n-i) / float64(i+1)
	}
	return max(0, 1-2*tail/math.Pow(2, float64(n)))
}

// ratios divides what was measured in the same round.
func ratios(a, b []float64) []float64 {
	r := make([]float64, min(len(a), len(b)))
	for i := range r {
		r[i] = a[i] / b[i]
	}
	return r
}
